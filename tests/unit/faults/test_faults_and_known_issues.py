"""Of every known issue: a failure with its very face that does not go away with its cure is not known.

*Verifies*: for each entry of each system, the decision of `shardproof.laboratory.attribution`. The worst case is
played: another defect, or a fault that a test plants, looks exactly as the entry describes, and goes on failing once
the entry is cured. It must end as new behind the entry. No rank runs. *Does not verify*: that real faults have these
faces, nor that cures cure. tests/conformance/test_faults_behind.py has real ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from shardproof.investigate.cure_table import scenario_of
from shardproof.issues.known_issues import KnownIssue, KnownIssues, known_issues_of
from shardproof.laboratory.attribution import attributed
from shardproof.protocol.registry import system_named
from shardproof.result import BY_CURE, BY_FACE, Evidence, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from shardproof.versions import split_cures

from tests.conformance.built_in import BUILT_IN

ISSUES = {system.name: KnownIssues(known_issues_of(system)) for system in BUILT_IN}
EVERY = [issue for known in ISSUES.values() for issue in known.issues]


@dataclass(frozen=True)
class Shown(Result):
    """A result whose evidence is given, and not worked out of differences."""

    shown: tuple[Evidence, ...] = ()

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return self.shown

    @property
    def aftermath(self) -> tuple[str, ...]:
        return ()


def like(pattern: str) -> str:
    """A text that a shell pattern matches."""
    for group, one in (("[[]", "["), ("[]]", "]"), ("[12]", "1"), ("[2-8]", "2")):
        pattern = pattern.replace(group, one)
    return pattern.replace("*", "x").replace("?", "x")


def with_the_face_of(issue: KnownIssue) -> Shown:
    """A failure on the scenario that shows the issue, with the first evidence that its entry names."""
    scenario = scenario_of(system_named(issue.system), Path(issue.scenario).stem)
    evidence = Evidence(issue.match.ops[0], like(issue.match.evidence[0]))
    return Shown(scenario, scenario.system, scenario.version, Verdict.MISMATCH, shown=(evidence,))


def known_with_cures(issue: KnownIssue) -> KnownIssues:
    """The system's entries that have a cure; this one on all axes, since a face may share its cause's scenario."""
    wide = replace(issue, match=replace(issue.match, axes={}, when=""))
    curable = (i for i in ISSUES[issue.system].issues if i.cure)
    return KnownIssues(tuple(wide if i.id == issue.id else i for i in curable))


def examined_cured(first: Shown, verdict: Verdict) -> Shown:
    return replace(first, verdict=verdict, shown=first.shown if verdict.is_failure else ())


@pytest.mark.parametrize("issue", [issue for issue in EVERY if issue.cure], ids=lambda issue: issue.id)
def test_what_stays_with_the_cure_is_new_behind_it(issue: KnownIssue) -> None:
    first = with_the_face_of(issue)
    ran: list[Scenario] = []

    def examine(scenario: Scenario) -> Result:
        """On the cured library the same face is there again, and no cure that is not asked for."""
        ran.append(scenario)
        _, cures = split_cures(scenario.version)
        return replace(examined_cured(first, Verdict.MISMATCH), scenario=scenario, cured=tuple(cures.split(",")))

    found = attributed(first, known_with_cures(issue), examine)
    assert ran, "the cure was not tried"
    assert len(found) == 2
    assert found[-1].behind
    assert not found[-1].known_issue
    assert found[0].known_by not in (BY_CURE, BY_FACE)


@pytest.mark.parametrize("issue", [issue for issue in EVERY if issue.cure], ids=lambda issue: issue.id)
def test_what_goes_with_the_cure_is_known_by_it(issue: KnownIssue) -> None:
    first = with_the_face_of(issue)

    def examine(scenario: Scenario) -> Result:
        _, cures = split_cures(scenario.version)
        return replace(examined_cured(first, Verdict.PASS), scenario=scenario, cured=tuple(cures.split(",")))

    (found,) = attributed(first, known_with_cures(issue), examine)
    assert found.known_by == BY_CURE
    assert issue.cure in {i.cure for i in ISSUES[issue.system].entries_named(found.known_issue or "")}


def test_entries_that_are_known_by_their_face_alone_become_fewer() -> None:
    """Behind these another defect with the same face would not be seen: the number may only fall. What a later release
    has repaired is not among them: it is told by a run of that release."""
    assert len([issue for issue in EVERY if not issue.cure and not issue.repaired]) <= FACE_ONLY


FACE_ONLY = 10
