"""A walk shrinks each new cause by itself: which failures it takes, in which order, and what it adds to the results."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from shardproof.investigate.shrink import MOST_SHRUNK, NewCauses
from shardproof.result import Failure, Result
from shardproof.scenario import Mesh, Scenario
from shardproof.verdict import Verdict

BIG = Scenario(mesh=Mesh(2, 2, 1), sharding="zero1", microbatches=2)


def failure(scenario: Scenario, why: str = "as it fails", **other: Any) -> Result:
    return Result(scenario, "reference", "1", Verdict.CRASH, error=Failure("E", why), **other)


def run(scenario: Scenario) -> Result:
    """In place of a laboratory: a scenario of more than one rank fails, and every other passes."""
    return failure(scenario) if scenario.mesh.world > 1 else Result(scenario, "reference", "1", Verdict.PASS)


def told(*results: Result) -> str:
    """What a run says while it shrinks them."""
    stream = io.StringIO()
    added(*results, stream=stream)
    return stream.getvalue()


def added(*results: Result, limit_s: float = 30.0, stream: io.StringIO | None = None) -> tuple[Result, ...]:
    causes = NewCauses({"reference": limit_s} if limit_s else {}, stream)
    for result in results:
        causes.add(result)
    return causes.shrunk(run, run)


def test_the_simplest_of_a_cause_is_shrunk_and_added() -> None:
    bigger = replace(BIG, mesh=Mesh(2, 2, 2))
    (found,) = added(failure(bigger), failure(BIG, behind="reference-1"))
    assert (found.scenario.mesh.world, found.shrunk_from, found.behind) == (2, BIG.id, "reference-1")


@pytest.mark.parametrize(
    "result",
    [
        failure(BIG, known_issue="reference-1"),
        failure(replace(BIG, faults=("no-op-load",))),
        replace(failure(BIG), verdict=Verdict.NONDETERMINISTIC),
        replace(failure(BIG), verdict=Verdict.PASS, error=None),
        replace(failure(BIG), verdict=Verdict.UNKNOWN),
    ],
)
def test_what_is_known_planted_or_passing_is_not(result: Result) -> None:
    assert added(result) == ()


def test_nothing_is_shrunk_where_no_walk_asks_for_it() -> None:
    assert added(failure(BIG), limit_s=0) == ()


def test_what_is_searched_for_is_told_only_where_somebody_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(failure(BIG)).startswith(f"shrinking {BIG.id}, for up to 30 s: ")
    added(failure(BIG))
    assert capsys.readouterr() == ("", "")


def test_what_was_run_already_is_not_added_again() -> None:
    (least,) = added(failure(BIG))
    assert added(failure(BIG), failure(least.scenario)) == ()


def test_only_a_few_causes_are_shrunk() -> None:
    said = told(*(failure(BIG, f"cause {chr(97 + n)}") for n in range(MOST_SHRUNK + 3)))
    assert said.count("shrinking ") == MOST_SHRUNK
    assert f"{MOST_SHRUNK + 3} new causes" in said
