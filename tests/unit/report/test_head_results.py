"""What a run came to on a head, and what became of the cures that do not apply there.

*Verifies*: with results that are made up, counts by reason, which cures are asked about, and what answers come to; that
the store and a merge keep them. *Does not verify*: a walk; `tests/conformance` has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.investigate import stale_cures
from shardproof.investigate.cure_table import scenario_of
from shardproof.investigate.stale_cures import checked, questions
from shardproof.issues.cure_check import LATER, NOT_SHOWN, REPAIRED, STALE, CureCheck
from shardproof.issues.known_issues import known_issues_of
from shardproof.merge import merge_runs, read_parts
from shardproof.protocol.registry import system_named
from shardproof.report.head_results import heads_of
from shardproof.report.json_report import to_json
from shardproof.report.model import Report
from shardproof.result import Failure, Result
from shardproof.scenario import Scenario
from shardproof.store import DATABASE, Store
from shardproof.verdict import ExitStatus, Verdict

from tests import report_samples as samples

WALKED = replace(scenario_of(system_named("megatron-core"), "2777-swap"), version="git:main+cured")
HEAD = "0.19.1+git.5be9626"
NOT_CURED = {"2777": "the code moved: line 9", "4046": "it changes the same lines as 2777", "164929": "the code moved"}


def result(verdict: Verdict = Verdict.PASS, reason: str = "", version: str = f"{HEAD}+cured", seed: int = 0) -> Result:
    scenario = replace(WALKED, seed=seed)
    return Result(scenario, "megatron-core", version, verdict, reason=reason, not_cured=NOT_CURED)


def test_a_head_counts_what_says_nothing_by_its_reason() -> None:
    unread = "our reader does not know `x`"
    found = [
        result(),
        result(Verdict.UNKNOWN, f"{unread}\nrank 0 in build"),
        result(Verdict.UNKNOWN, f"{unread}\nrank 3 in load", version=HEAD),
        result(Verdict.UNKNOWN, "TypeError: f() takes no x"),
        result(version="0.16.1+cured"),
    ]
    (head,) = heads_of(found)
    assert (head.system, head.version, head.scenarios, head.hidden) == ("megatron-core", HEAD, 4, 3)
    assert list(head.unknown.items()) == [(unread, 2), ("TypeError: f() takes no x", 1)]


@pytest.mark.parametrize(
    ("refused", "failed", "status"),
    [(1, 0, ExitStatus.OK), (2, 0, ExitStatus.HARNESS), (2, 1, ExitStatus.FAILURE)],
)
def test_a_head_that_refuses_over_a_tenth_of_what_the_newest_release_runs_is_no_pass(
    tmp_path: Path, refused: int, failed: int, status: ExitStatus
) -> None:
    found = [result(seed=n) for n in range(10)]
    for n in range(refused):
        found[n] = result(Verdict.UNSUPPORTED, "it takes no such argument", seed=n)
    for n in range(refused, refused + failed):
        found[n] = result(Verdict.CRASH, seed=n)
    with Store(tmp_path / DATABASE) as store:
        run_id = store.begin_run(["run"], 0, {}, planned=[each.scenario for each in found])
        store.finished_many(run_id, found)
        report = Report.from_store(store, run_id)
    (head,) = report.heads
    assert (head.lost.lost, head.lost.too_much) == (refused, refused > 1)
    assert report.status is status


def test_a_release_that_was_walked_is_no_head_and_asks_nothing() -> None:
    assert heads_of([result(version="0.16.1+cured")]) == ()
    assert questions([result(version="0.16.1+cured")]) == []


def test_own_cures_whose_lines_are_not_there_are_asked_about_once() -> None:
    """Not those that give way to another cure, nor those of a system that this one stands on."""
    (asked,) = questions([result(), result(seed=1)])
    assert (asked.cure, asked.version, asked.why) == ("2777", f"{HEAD}+cured", NOT_CURED["2777"])
    assert {scenario.version for scenario in asked.scenarios} == {"git:main+cured"}
    assert len(asked.scenarios) > 1


def answers(*verdicts: Verdict) -> list[CureCheck]:
    def examine(scenarios: Iterable[Scenario]) -> Iterator[tuple[Result, ...]]:
        for n, scenario in enumerate(scenarios):
            verdict = verdicts[n % len(verdicts)]
            error = Failure("E", "lost", op=1) if verdict is Verdict.CRASH else None
            yield (Result(scenario, "megatron-core", HEAD, verdict, error=error, reason="a limit" * (not error)),)

    return checked(questions([result()]), examine)


@pytest.mark.parametrize(
    ("verdicts", "standing", "shows"),
    [
        ((Verdict.PASS,), REPAIRED, ""),
        ((Verdict.PASS, Verdict.CRASH), STALE, "E: lost"),
        ((Verdict.UNKNOWN, Verdict.CRASH), STALE, "E: lost"),
        ((Verdict.PASS, Verdict.UNSUPPORTED), NOT_SHOWN, "unsupported: a limit"),
    ],
)
def test_what_scenarios_of_a_cure_show(verdicts: tuple[Verdict, ...], standing: str, shows: str) -> None:
    (check,) = answers(*verdicts)
    assert check.standing == standing
    assert shows in check.shows
    assert bool(check.shows) is bool(shows)


@pytest.mark.parametrize(
    ("since", "fixed", "standing", "shows"),
    [
        ("0.13.0 or earlier", "", REPAIRED, ""),
        ("0.13.0", "core_v0.17.0, by pull request 3537", REPAIRED, "core_v0.17.0, by pull request 3537"),
        ("0.20.0", "", LATER, "the defect is known from 0.20.0 on"),
        ("main of 11 August 2026", "", LATER, "the defect is known from main of 11 August 2026 on"),
    ],
)
def test_a_defect_that_a_head_does_not_show_is_repaired_said_so_or_younger(
    monkeypatch: pytest.MonkeyPatch, since: str, fixed: str, standing: str, shows: str
) -> None:
    entry = replace(known_issues_of(system_named("megatron-core"))[0], since=since, fixed=fixed)
    monkeypatch.setattr(stale_cures, "_entries", lambda system, cure: [entry])
    (check,) = answers(Verdict.PASS)
    assert (check.standing, check.shows) == (standing, shows)


def test_a_cure_whose_scenarios_did_not_run_is_not_shown() -> None:
    (check,) = checked(questions([result()]), lambda scenarios: iter(()))
    assert (check.standing, check.shows) == (NOT_SHOWN, "no scenario ran")


def test_the_store_a_merge_and_the_json_keep_what_became_of_cures(tmp_path: Path) -> None:
    checks = [*answers(Verdict.PASS), replace(answers(Verdict.CRASH)[0], cure="3949")]
    (tmp_path / "a").mkdir()
    with Store(tmp_path / "a" / DATABASE) as store:
        run_id = store.begin_run(["run"], 0, {}, planned=[WALKED])
        store.finished(run_id, result())
        store.checked(run_id, checks)
        store.checked(run_id, checks[:1])
        assert store.cure_checks(run_id) == checks
        (head,) = Report.from_store(store, run_id).heads
    assert [check.cure for check in head.repaired] == ["2777"]
    assert [check.cure for check in head.stale] == ["3949"]
    merged = merge_runs(read_parts([tmp_path / "a" / DATABASE]), tmp_path / "all.sqlite", samples.ISSUES)
    assert merged.heads == (head,)
    (plain,) = to_json(merged)["run"]["heads"]
    assert [check["standing"] for check in plain["cures"]] == [REPAIRED, STALE]
