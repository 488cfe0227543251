"""The history of a folder: what came, stayed, went and came again, judged by the nights on which it could show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from shardproof.cli.main import entry
from shardproof.report import figures, json_report
from shardproof.report.history import History, Night, Trace, history_of, state_of
from shardproof.report.history_text import render_history
from shardproof.report.html import render_index, write_history
from shardproof.report.model import Report
from shardproof.report.summary import render_summary
from shardproof.report.text import render_text
from shardproof.result import Result
from shardproof.store import Store
from shardproof.verdict import Verdict


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
        return Report.from_store(store, run, samples.ISSUES)


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
    assert "This is the first run in its folder." in render_index(replace(samples.report(), before={}))


def test_nights_without_a_failure_are_told(tmp_path: Path) -> None:
    page = render_index(nights(tmp_path, (samples.passing(1),), (samples.passing(1),)))
    assert "<p>No scenario failed in any of them.</p>" in page


# --- the command, its text and its page ----------------------------------------------------------------------


def three_nights(folder: Path) -> Report:
    crash, other, known = samples.crash(), samples.mismatch(), samples.hang()
    return nights(
        folder, (crash, known, samples.passing(1)), (healed(crash), known, samples.passing(1)), (other, crash, known)
    )


def test_the_command_prints_a_line_for_each_signature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = three_nights(tmp_path)
    assert entry(["history", str(tmp_path), "--json", str(tmp_path / "history.json")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"history of {tmp_path}: 3 runs, 20")
    assert said[1:3] == [
        "1 new, 1 flaky; of known issues: 1 recurring",
        "the last night, by cause: 1 first seen, 1 back again, 1 still there",
    ]
    assert said[5].startswith(f"new         --1     {samples.mismatch().signature}")
    assert said[6].startswith("flaky       1·1     torch-fsdp2 crash: ")
    assert said[7].startswith("recurring   111     torch-fsdp2 hang: ")
    assert said[7].endswith("  (known: torch-fsdp2-1)")
    assert said[-1] == f"page: {tmp_path / 'history.html'}"
    document = json.loads((tmp_path / "history.json").read_text("utf-8"))
    assert [night["new"] for night in document["nights"]] == [1, 0, 2]
    shown = {trace["signature"]: (trace["shown"], trace["example"]) for trace in document["traces"]}
    assert shown[samples.mismatch().signature] == ([None, None, 1], samples.mismatch().id)
    assert report.history.to_json()["traces"] == [{**t, "shown": tuple(t["shown"])} for t in document["traces"]]


def test_a_known_issue_is_seen_for_the_first_time_and_never_called_new(tmp_path: Path) -> None:
    report = nights(tmp_path, (samples.passing(1),), (samples.hang(), samples.mismatch(), samples.passing(1)))
    assert report.history.in_words == "1 new; of known issues: 1 first seen"
    lines = render_history(report.history, "reports/nightly", "page").splitlines()
    assert any(line.startswith("first seen ") and line.endswith("(known: torch-fsdp2-1)") for line in lines)
    page = write_history(report.history, tmp_path).read_text("utf-8")
    assert "New <b>1</b>" in page
    assert "First seen <b>1</b>" in page


def test_run_history_and_pages_count_the_same_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three scenarios are repaired, of two causes; a cause that still shows in one scenario is not repaired."""
    crash, other = samples.crash(), samples.mismatch()
    twin = replace(crash, scenario=replace(crash.scenario, seed=77))
    half = replace(crash, scenario=replace(crash.scenario, seed=78))
    gone = samples.hang()
    report = nights(
        tmp_path, (crash, twin, gone, half), (healed(crash), healed(twin), healed(gone), half, other)
    )  # fmt: skip
    told = "1 first seen, 1 still there, 1 fixed"
    assert report.history.tonight_in_words == told
    assert report.by_cause == f"2 new; against earlier runs: {told}"
    assert f"by cause: 2 new; against earlier runs: {told}\n" in render_text(report)
    assert f"By cause: 2 new; against earlier runs: {told}." in render_index(report)
    assert f"By cause: 2 new; against earlier runs: {told}." in render_summary(report)
    assert json_report.to_json(report)["run"]["causes"] == {
        "unknown": 0, "new": 2, "known": 0, "first seen": 1, "back again": 0, "still there": 1, "fixed": 1,
    }  # fmt: skip
    assert entry(["history", str(tmp_path)]) == 0
    assert f"the last night, by cause: {told}\n" in capsys.readouterr().out
    assert f"The last night, by cause: {told}." in write_history(report.history, tmp_path).read_text("utf-8")


def test_a_scenario_of_a_commit_is_the_same_one_on_the_next_commit(tmp_path: Path) -> None:
    def on(result: Result, commit: str) -> Result:
        return replace(result, scenario=replace(result.scenario, version=f"git:{commit}+cured"))

    crash, hang, other = samples.crash(), samples.hang(), samples.mismatch()
    report = nights(
        tmp_path, (on(crash, "a"), on(hang, "a"), crash), (on(crash, "b"), on(healed(hang), "b"), on(other, "b"))
    )
    assert report.history.tonight_in_words == "1 first seen, 1 still there, 1 fixed"
    assert {key: past.run_id for key, past in report.before.items()} == dict.fromkeys(
        [on(crash, "b").id, on(hang, "b").id], report.history.nights[0].run
    )
    assert [trace.example for trace in report.history.traces if trace.turn == "still there"] == [on(crash, "b").id]


@pytest.mark.parametrize(
    ("shown", "turn"),
    [((0, 2), "first seen"), ((None, 2), "first seen"), ((1, 2), "still there"), ((1, None, 2), "still there"),
     ((1, 0, 2), "back again"), ((1, 0), "fixed"), ((1, None, 0), "fixed"), ((1, 0, 0), ""), ((1, None), ""),
     ((2,), "first seen")],
)  # fmt: skip
def test_what_the_last_night_says(shown: tuple[int | None, ...], turn: str) -> None:
    assert Trace("a", "", state_of(shown), shown).turn == turn


def test_only_so_many_nights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_nights(tmp_path)
    assert entry(["history", str(tmp_path), "--nights", "2"]) == 0
    said = capsys.readouterr().out
    assert ": 2 runs, " in said
    assert "new         ·1" in said, "the night on which it failed before is not among them"


def test_on_the_first_night_everything_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nights(tmp_path, (samples.crash(), samples.passing(1)))
    assert entry(["history", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert ": 1 run, " in said[0]
    assert said[1] == "1 new"


def test_a_folder_without_a_run_has_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(tmp_path / "results.sqlite"):
        pass
    assert entry(["history", str(tmp_path)]) == 2
    assert "allowed: a database with a run; for example: shardproof history reports/nightly" in capsys.readouterr().err
    assert not (tmp_path / "history.html").exists()


def test_the_page_leads_to_the_pages_that_are_there(tmp_path: Path) -> None:
    history = three_nights(tmp_path).history
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / f"{samples.mismatch().id}.html").write_text("")
    page = write_history(history, tmp_path).read_text("utf-8")
    assert page.count('href="failures/') == 1
    assert f'href="failures/{samples.mismatch().id}.html"' in page
    assert samples.HOSTILE not in page
    for state in ("new", "flaky", "recurring"):
        assert f'<section id="{state}">' in page
    assert '<section id="fixed">' not in page


def test_folders_in_which_nothing_failed(tmp_path: Path) -> None:
    history = nights(tmp_path, (samples.passing(1),), (samples.passing(1),)).history
    assert "Nothing ever failed" in write_history(history, tmp_path).read_text("utf-8")
    assert render_history(history, "x", "y").splitlines()[1] == "nothing ever failed"


def test_what_came_and_went_on_which_night() -> None:
    history = History(
        tuple(Night(f"run-{n}", f"2026-01-0{n + 1}", n, 1, 9) for n in range(4)),
        (
            Trace("a", "", "flaky", (1, 0, None, 2)), Trace("b", "", "new", (None, None, None, 1)),
            Trace("c", "", "fixed", (3, 3, 0, 0)), Trace("d", "", "recurring", (None, 12, 12, 12)),
        ),
    )  # fmt: skip
    assert history.turns == ((0, 0), (1, 1), (0, 1), (2, 0))
    assert [(trace.first, trace.last) for trace in history.traces] == [(0, 3), (3, 3), (0, 1), (1, 3)]
    drawn = figures.nights(history)
    assert [bar.appeared[0] for bar in drawn.bars] == [0, 1, 0, 2]
    assert drawn.bars[3].new[1] == 52.5
    assert "2026-01-04: 3 new, 1 known; 2 came, 0 went" in drawn.text
    assert "-+++" in render_history(history, "x", "y")
    assert "\x1b[33mflaky" in render_history(history, "x", "y", colour=True)


def test_what_is_known_is_not_called_new(tmp_path: Path) -> None:
    crash, known = samples.crash(), samples.hang()
    nights(tmp_path, (samples.passing(1),), (crash, known, samples.passing(1)))
    with Store(tmp_path / "results.sqlite") as store:
        assert history_of(store, store.runs()[-1].id).in_words == "1 new; of known issues: 1 first seen"


def test_a_folder_without_runs_is_told_with_those_that_have_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry(["history", "reports/nightly"]) == 2
    assert "for example: shardproof run smoke, then shardproof history reports/smoke" in capsys.readouterr().err
    (tmp_path / "reports/nightly-a1").mkdir(parents=True)
    nights(tmp_path / "reports/nightly-a1", (samples.passing(1),))
    assert entry(["history", "reports/nightly"]) == 2
    assert "for example: shardproof history reports/nightly-a1" in capsys.readouterr().err


def test_a_smaller_scenario_is_told_beside_the_planned_ones(tmp_path: Path) -> None:
    smaller = replace(samples.crash(), shrunk_from=samples.passing(1).id)
    report = nights(tmp_path, (samples.passing(1), smaller))
    assert report.in_words == "1 pass, 1 new (1 planned, and 1 smaller found while shrinking)"
    assert "(1 planned, and 1 smaller found while shrinking)" in render_text(report, None)
