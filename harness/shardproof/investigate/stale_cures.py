"""Cures whose patch does not apply to a head: decides whether the defect is repaired there, or its lines only moved.

A cure is a patch, and a head moves its lines. "The code moved" hides two facts of opposite meaning. Either the defect
is gone, and the entry's claim is out of date; or it is still there, and the walk stops at it again as if it had no
cure. So after a walk over a head the scenarios of each such cure run once on that head, with everything else cured:

* All pass: *repaired*. Where the entry says so already, its words are kept.
* One fails: *stale*. Somebody has to write the cure anew; what failed is said.
* All pass, and the entry knows the defect only from a later release on: *later*. There is nothing to repair.
* Neither, because a limit refuses one or something of ours does not fit: *not shown*.

*Does not verify*: that what fails is the cure's own defect. It is what stands where that defect stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from packaging.version import Version

from shardproof.investigate.cure_table import scenario_of
from shardproof.issues.cure_check import LATER, NOT_SHOWN, REPAIRED, STALE, CureCheck
from shardproof.issues.cures import CLASH, cures_of
from shardproof.issues.known_issues import KnownIssue, bound_of, known_issues_of
from shardproof.laboratory.misfits import on_head
from shardproof.protocol.registry import system_named
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from shardproof.versions import is_version


@dataclass(frozen=True)
class Question:
    """A cure that did not apply in a walk, and the scenarios that tell why."""

    system: str
    version: str
    cure: str
    why: str
    scenarios: tuple[Scenario, ...]

    def answered(self, results: Mapping[Scenario, Result]) -> CureCheck:
        """What the results of its scenarios come to."""
        own = [results[scenario] for scenario in self.scenarios if scenario in results]
        failed = next((result for result in own if result.verdict.is_failure), None)
        silent = next((result for result in own if result.verdict is not Verdict.PASS), None)
        if failed is not None:
            return self._check(STALE, failed.signature)
        if silent is not None or not own:
            reason = silent.reason.split("\n", 1)[0] if silent else "no scenario ran"
            return self._check(NOT_SHOWN, f"{silent.verdict.value}: {reason}" if silent else reason)
        if young := _younger(self.system, self.cure, self.version):
            return self._check(LATER, young)
        return self._check(REPAIRED, next((entry.fixed for entry in _entries(self.system, self.cure)), ""))

    def _check(self, standing: str, shows: str) -> CureCheck:
        return CureCheck(self.system, self.version, self.cure, self.why, standing, shows)


def _entries(system: str, cure: str) -> list[KnownIssue]:
    """The entries whose defect a cure takes away."""
    info = system_named(system)
    every = (*known_issues_of(info), *known_issues_of(info, hidden=True))
    return [entry for entry in every if entry.cure == cure]


def _younger(system: str, cure: str, version: str) -> str:
    """Why a defect that a head does not show may be younger than the head; empty where its entries know it from an
    older release."""
    called = version.partition("+")[0]
    texts = [entry.since for entry in _entries(system, cure)]
    for since in texts:
        bound = bound_of(since)
        if bound is not None and not (is_version(called) and Version(called) < bound.version):
            return ""
    return f"the defect is known from {texts[0]} on" if texts else ""


def questions(results: Iterable[Result]) -> list[Question]:
    """The cures of the systems' own that did not apply to heads on which results were reached."""
    found: dict[tuple[str, str, str], Question] = {}
    for result in results:
        system = system_named(result.system)
        if not result.not_cured or not on_head(system, result.version):
            continue
        for cure in cures_of(system):
            why = result.not_cured.get(cure.id, CLASH)
            key = (result.system, result.version, cure.id)
            if key not in found and not why.startswith(CLASH):
                scenarios = (scenario_of(system, name) for name in cure.shown_by if "/" not in name)
                there = tuple(replace(each, version=result.scenario.version) for each in scenarios)
                found[key] = Question(*key, why, there)
    return list(found.values())


def checked(
    asked: Iterable[Question], examine: Callable[[Iterable[Scenario]], Iterator[tuple[Result, ...]]]
) -> list[CureCheck]:
    """The answers to questions.

    Args:
        examine: runs scenarios side by side; of each, its result comes first.
    """
    asked = list(asked)
    wanted = dict.fromkeys(scenario for question in asked for scenario in question.scenarios)
    results = {first.scenario: first for first, *_ in examine(wanted)}
    return [question.answered(results) for question in asked]
