"""docs/faults.md is what `python -m docs.written.fault_page` writes, and the record of what is said of each fault.

*Verifies*: that the page, the catalogue, the public bugs and the record are in step; at night, that a search finds
every exposing scenario anew, and that what is said of each fault is what is recorded.
*Does not verify*: in CI what becomes of a fault; the canaries plant every one of them there.
"""

from __future__ import annotations

import tomllib

import pytest
from shardproof.entry import resolve
from shardproof.faults.catalogue import CATALOGUE, FOLDER, FOUND, LIST, Fault, mechanisms, scenarios_of

from docs.written.fault_page import collected, left_out, render, represented
from tests.exposing import RECORD, ROOT, can_show, record_of, search

AGAIN = "write it anew: python -m docs.written.fault_page > docs/faults.md"
RECORDED = tomllib.loads(RECORD.read_text("utf-8"))
ENTRIES = {fault["id"]: fault for fault in tomllib.loads((FOLDER / LIST).read_text("utf-8"))["fault"]}


def test_the_page_is_what_the_files_say() -> None:
    assert (ROOT / "docs/faults.md").read_text("utf-8") == render(), AGAIN


def test_every_public_bug_is_represented_or_left_out_with_a_reason() -> None:
    assert set(collected()) == set(represented()) | set(left_out())
    assert not set(represented()) & set(left_out())
    assert len(represented()) >= 134


def test_every_fault_has_a_function_a_mechanism_and_a_scenario() -> None:
    for fault in CATALOGUE.values():
        assert callable(resolve(f"shardproof.faults.{ENTRIES[fault.id]['plants']}")), fault.id
        assert fault.mechanism in mechanisms(), fault.id
        assert fault.scenario_axes, f"{fault.id}: python -m tests.exposing"
    assert {fault.mechanism for fault in CATALOGUE.values()} == set(mechanisms())


def test_what_was_found_is_of_the_catalogue_and_meets_the_conditions() -> None:
    found = tomllib.loads((FOLDER / FOUND).read_text("utf-8"))["fault"]
    assert set(found) == {fault.id for fault in CATALOGUE.values() if fault.shows is not None}
    for fault in CATALOGUE.values():
        for scenario in scenarios_of(fault) if fault.shows is not None else ():
            assert can_show(fault, scenario), fault.id


def test_the_record_is_of_the_catalogue_and_every_fault_is_noticed_in_it() -> None:
    assert list(RECORDED) == list(CATALOGUE)
    for name, record in RECORDED.items():
        assert all(verdict == "mismatch" or verdict.startswith("crash") for verdict in record["verdict"]), name


SPOKEN = (
    "initialising-load-decays", "counting-stops-early", "empty-bytes-decoded", "halves-of-local", "padding-summed",
    "empty-shard-wins", "offset-of-another-group", "moments-in-two-views", "group-steps-not-saved", "detached-shards",
    "state-in-model-order", "buffers-of-the-first-kind", "transposed-under-the-old-dims", "rows-for-a-flat-partition",
    "experts-averaged-over-their-own",
)  # fmt: skip
"""Faults that rules speak of that speak of no other."""


def test_nine_in_ten_are_explained_rightly() -> None:
    explained = [RECORDED[f.id] for f in CATALOGUE.values() if mechanisms()[f.mechanism]]
    assert sum(entry["top1"] for entry in explained) >= 0.9 * len(explained)
    assert sum(entry["top3"] for entry in explained) >= 0.98 * len(explained)


@pytest.mark.parametrize("name", SPOKEN)
def test_what_is_said_of_some_is_what_is_recorded(name: str) -> None:
    assert record_of(CATALOGUE[name]) == RECORDED[name]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", CATALOGUE.values(), ids=lambda fault: fault.id)
def test_what_is_said_of_a_fault_is_what_is_recorded(fault: Fault) -> None:
    assert record_of(fault) == RECORDED[fault.id]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [f for f in CATALOGUE.values() if f.shows is not None], ids=lambda fault: fault.id)
def test_the_search_finds_the_scenario_anew(fault: Fault) -> None:
    scenario, _, _ = search(fault)
    assert scenario is not None
    assert {axis: scenario.axis_text(axis) for axis in scenario.axis_values(only_changed=True)} == dict(
        fault.scenario_axes[0]
    )
