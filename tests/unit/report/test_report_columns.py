"""The results as columns: every result comes out as it went in, whatever its texts are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import report_samples as samples
from shardproof.report.columns import ALPHABET, columns_of
from shardproof.report.index_page import index_page
from shardproof.report.model import Report


def document(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(index_page(report).columns)
    return found


def decoded(column: dict[str, Any]) -> list[str]:
    width, codes = column["width"], column["codes"]
    words = [codes[at : at + width] for at in range(0, len(codes), width)]
    return [column["values"][sum(ALPHABET.index(c) * 64**n for n, c in enumerate(word))] for word in words]


def test_every_result_comes_out_as_it_went_in() -> None:
    report = samples.report()
    found = document(report)
    columns = {column["name"]: decoded(column) for column in found["columns"]}
    ids = [found["ids"][at : at + 12] for at in range(0, len(found["ids"]), 12)]
    assert ids == [r.id for r in report.results]
    assert columns["standing"] == [r.counts_as.value for r in report.results]
    assert columns["verdict"] == [r.verdict.value for r in report.results]
    assert columns["seen"] == [report.change(r).shown for r in report.results]
    for n, result in enumerate(report.results):
        told = {axis: columns[axis][n] for axis in columns if axis in result.scenario.axis_values()}
        assert {**result.scenario.axis_values(), **told} == result.scenario.axis_values()


def test_more_than_64_values_take_two_characters() -> None:
    report = samples.report(*(samples.passing(seed) for seed in range(200)))
    (seeds,) = [column for column in document(report)["columns"] if column["name"] == "seed"]
    assert seeds["width"] == 2
    assert decoded(seeds) == [str(seed) for seed in range(200)]
    assert seeds["values"] == [str(seed) for seed in range(200)], "sorted as a person counts"


def test_meshes_are_sorted_by_their_world_and_what_all_share_is_told_once() -> None:
    meshes = ("1x8x1", "2x2x1", "1x2x1")
    found = document(samples.report(*(samples.passing(1, mesh=mesh, dtype="bf16") for mesh in meshes)))
    (mesh,) = [column for column in found["columns"] if column["name"] == "mesh"]
    assert mesh["values"] == ["1x2x1", "2x2x1", "1x8x1"]
    assert found["same"] == {"dtype": "bf16", "seed": "1"}


def test_a_failure_without_a_page_is_said_to_have_none() -> None:
    report = samples.report(samples.passing(), samples.crash(), samples.mismatch())
    causes = {result.id: "c" for result in report.failures}
    found = json.loads(columns_of(report, causes, {"c": "told"}, {samples.crash().id}))
    assert found["unpaged"] == [2]


def test_no_text_can_end_the_element_that_holds_it() -> None:
    hostile = replace(samples.passing(1, model="</script>"), version="<!-- & \u2028")
    text = index_page(samples.report(hostile, samples.passing(2))).columns
    assert not set("<>&\u2028") & set(text)


def test_ten_thousand_results_are_a_third_of_a_megabyte() -> None:
    assert len(index_page(samples.many()).columns.encode()) < 350_000


def test_each_axis_of_a_trainer_is_a_column() -> None:
    plain = samples.cell()
    every = [plain.scenario.with_axes({"options": options}) for options in ("", "mesh=4", "cause=x+mesh=4")]
    found = document(samples.report(*(replace(plain, scenario=scenario) for scenario in every)))
    columns = {column["name"]: column for column in found["columns"]}
    assert decoded(columns["mesh"]) == ["first value", "4", "4"]
    assert columns["mesh"]["default"] == "first value"
    assert decoded(columns["cause of the trainer"]) == ["first value", "first value", "x"]
    assert "options" not in {*columns, *found["same"]}
