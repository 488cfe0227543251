"""What all reports share: counts, clusters, history."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import report_samples as samples
from shardproof.report.html import render_failure, render_index
from shardproof.report.model import Change, Report
from shardproof.report.summary import render_summary
from shardproof.report.text import render_result, render_text
from shardproof.store import Store
from shardproof.store_history import Past
from shardproof.verdict import Verdict
from shardproof.wording.lines import headline


def test_counts_name_every_verdict() -> None:
    report = samples.report()
    assert sum(report.counts.values()) == len(report.results)
    assert set(report.counts) == set(Verdict)
    assert report.known == 1
    assert report.emulated == ("CUDA streams",)
    assert [result.id for result in report.results if report.emulated_only(result)] == [samples.crash().id]


def test_devices_are_named_where_something_ran_on_a_gpu() -> None:
    assert samples.report().devices == ()
    on_gpu = replace(samples.passing(), device="1 x H200, one a rank, NCCL")
    assert samples.report(on_gpu, samples.passing(1)).devices == ("1 x H200, one a rank, NCCL", "cpu")


def test_a_failure_with_another_signature_is_new() -> None:
    failing = samples.mismatch()

    def change(past: Past | None, result=failing) -> Change:  # type: ignore[no-untyped-def]
        return replace(samples.report(), before={result.id: past} if past else {}).change(result)

    same = Past("r", "2.12.0", Verdict.MISMATCH, failing.signature)
    assert change(None) is Change.NEW
    assert change(same) is Change.RECURRING
    assert change(replace(same, signature="another")) is Change.NEW
    assert change(replace(same, verdict=Verdict.PASS, signature="")) is Change.NEW
    passing = samples.passing()
    assert change(same, passing) is Change.FIXED
    assert change(None, passing) is Change.NONE
    assert change(same, samples.unsupported()) is Change.NONE


def test_one_mechanism_is_one_cluster_with_its_simplest_member_first() -> None:
    big = samples.mismatch(seed="3", model="twins", checkpoint="full")
    clusters = samples.report(big, samples.mismatch(), samples.passing()).clusters()
    assert [c.members for c in clusters] == [(samples.mismatch(), big)]
    assert clusters[0].mechanism == "wrong_dtype"
    assert clusters[0].simplest == samples.mismatch()


def test_of_two_results_the_one_with_fewer_options_is_simpler() -> None:
    """All axes of a trainer that are not plain stand in its options."""
    few, many = samples.mismatch(options="b"), samples.mismatch(options="a+b+c+d")
    for results in ((few, many), (many, few)):
        (cluster,) = samples.report(*results).clusters()
        assert cluster.simplest is few


def test_a_known_member_never_hides_among_new_ones_nor_the_other_way_round() -> None:
    new, known = samples.hang(None), replace(samples.hang(), scenario=samples.scenario(seed="5"))
    clusters = samples.report(known, new).clusters()
    assert [c.known_issue for c in clusters] == [None, "torch-fsdp2-1"]


def test_causes_are_ordered_by_urgency() -> None:
    verdicts = [c.simplest.verdict for c in samples.report().clusters()]
    assert verdicts == [Verdict.UNKNOWN, Verdict.MISMATCH, Verdict.CRASH, Verdict.HANG]


@pytest.mark.parametrize(
    ("out", "place"),
    [("reports/nightly", ""), ("", ""), ("elsewhere/it's mine", " --out 'elsewhere/it'\"'\"'s mine'"),
     ("/reports/nightly", " --out /reports/nightly"), ("reports/tonight/nightly", " --out reports/tonight/nightly")],
)  # fmt: skip
def test_commands_name_a_folder_that_is_not_looked_through(out: str, place: str) -> None:
    report = samples.report(samples.crash())
    run = replace(report.run, command=("run", "nightly", *(("--out", out) if out else ()), "-j", "2"))
    report = replace(report, run=run)
    assert report.place == place
    asked = f"{samples.crash().id}{place}"
    assert f"replay {asked}\n" in render_text(report)
    page = unescape(render_failure(report, samples.crash()))
    assert all(f"shardproof {command} {asked}<" in page for command in ("replay", "explain"))
    assert f"shardproof shrink {asked} --toml" in page
    assert f"shardproof replay {asked}<" in unescape(render_index(report))
    assert f"replay {asked}`" in render_summary(report)


def test_much_that_was_cured_or_emulated_is_counted_on_a_terminal_and_folded_on_the_page() -> None:
    cured, parts = tuple(f"library-{n}" for n in range(60)), tuple(f"part {n}" for n in range(9))
    result = replace(samples.crash(), cured=cured, not_cured={"old": "no such file", "older": "nor it"}, emulated=parts)
    said = render_result(result)
    assert "  60 known defects cured; 2 cures do not apply to this release\n" in said
    assert "  emulated: part 0; and 8 more\n" in said
    page = render_failure(samples.report(result), result)
    assert '<dt>cured</dt><dd><details class="aside"><summary>60</summary>library-0; library-1;' in page
    assert "<p>older: nor it</p>" in page


def test_what_was_left_out_is_counted() -> None:
    report = samples.report()
    assert report.unsupported() == [("torch-fsdp2", "FSDP2 offloads all of a unit or nothing", 2)]
    assert report.normalisations() == [("torch-fsdp2", "exp_avg: zeros", 1)]


def test_headlines_fall_back_from_explanation_to_error_to_differences_to_reason() -> None:
    mismatch = samples.mismatch()
    assert headline(mismatch).startswith("State was cast")
    assert headline(samples.crash()).startswith("builtins.RuntimeError on rank 5: size of tensor a (3)")
    unexplained = replace(mismatch, explanations=())
    assert headline(unexplained) == "exp_avg dtype, param bits, written step missing (3 differences)"
    assert headline(samples.unknown()) == "twin and reference disagree"
    assert headline(samples.passing()) == "every compared bit is as expected"
    assert headline(replace(samples.passing(), verdict=Verdict.HANG)) == "no further detail"


def test_a_report_of_a_stored_run(tmp_path: Path) -> None:
    results = samples.every_kind()
    with Store(tmp_path / "results.sqlite") as store:
        for count in (len(results), 4):
            run = store.begin_run(["shardproof"], 0, {})
            store.plan(run, [r.scenario for r in results])
            store.finished_many(run, results[:count])
        report = Report.from_store(store, run, samples.ISSUES)
    assert report.results == results[:4]
    assert report.missing == tuple(r.scenario for r in results[4:])
    assert report.change(results[2]) is Change.RECURRING
    assert report.issues is samples.ISSUES
