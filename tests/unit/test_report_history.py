"""The history of a folder: what came, stayed, went and came again, judged by the nights on which it could show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples

from harness.report.history import state_of
from harness.report.html import render_index
from harness.report.model import Report
from harness.result import Result
from harness.store import Store
from harness.verdict import Verdict


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ((0, 0, 2), "new"), ((None, None, 2), "new"), ((1, 2), "recurring"), ((0, 1, None, 1), "recurring"),
        ((1, 0, 1), "flaky"), ((0, 1, 0, 1, 0), "flaky"), ((2, 0), "fixed"), ((2, 0, 0), "fixed"),
        ((2, None), "not run"),
    ],
)  # fmt: skip
def test_what_the_nights_say_together(shown: tuple[int | None, ...], state: str) -> None:
    assert state_of(shown) == state


def nights(folder: Path, *runs: tuple[Result, ...]) -> Report:
    with Store(folder / "results.sqlite") as store:
        for results in runs:
            run = store.begin_run(("run", "nightly"), 0, {})
            store.plan(run, [result.scenario for result in results])
            store.finished_many(run, results)
            store.end_run(run)
        return Report.of(store, run, samples.ISSUES)


def healed(result: Result) -> Result:
    return replace(result, verdict=Verdict.PASS, error=None, differences=(), explanations=())


def test_a_folder_of_three_nights(tmp_path: Path) -> None:
    crash, other, known = samples.crash(), samples.mismatch(), samples.hang()
    report = nights(
        tmp_path, (crash, known, samples.passing(1)), (healed(crash), known, samples.passing(1)), (other, crash, known)
    )
    found = {trace.signature: (trace.state, trace.shown, trace.known) for trace in report.history.traces}
    assert found == {
        crash.signature: ("flaky", (1, 0, 1), ""),
        other.signature: ("new", (None, None, 1), ""),
        known.signature: ("recurring", (1, 1, 1), "torch-fsdp2-1"),
    }
    assert [(night.new, night.known) for night in report.history.nights] == [(1, 1), (0, 1), (2, 1)]
    page = render_index(report)
    assert '<section id="history">' in page
    assert 'aria-label="1, 0, 1"' in page


def test_one_night_has_no_history(tmp_path: Path) -> None:
    assert nights(tmp_path, (samples.crash(),)).history.nights == ()
    assert '<section id="history">' not in render_index(replace(samples.report(), before={}))
