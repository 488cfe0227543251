"""Finds entries of `issues.toml` whose defect is gone: their own regression scenario ran without a cure, and passed.

An entry is written for the releases of its day. When a newer one repairs the defect, nothing fails any more, and nobody
is told: the entry would stay for ever, and could swallow another defect with the same face. So a run in which the
regression itself passes says so. That a nightly does not show a defect proves nothing, since its cells need not reach
it; therefore only the regression counts.

*Verifies*: the scenario that passed is that of the entry's file, whatever the release.
*Does not verify*: that the release repaired it on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardproof.errors import UsageError
from shardproof.issues.known_issues import KnownIssue
from shardproof.protocol.registry import system_named
from shardproof.report.model import Report
from shardproof.result import Result
from shardproof.space.defaults import completed
from shardproof.tables import load_toml, text_of
from shardproof.verdict import Verdict

_WHICHEVER = ("version", "device", "seed")
"""Axes that an entry's file leaves open."""


@dataclass(frozen=True)
class Repaired:
    """An entry whose regression passed: on which release, and the id of that result."""

    issue: KnownIssue
    version: str
    result_id: str


def repaired(report: Report) -> tuple[Repaired, ...]:
    """The entries whose regressions passed in a run, in the order of the entries."""
    passed: dict[str, list[Result]] = {}
    for result in report.results:
        if result.verdict is Verdict.PASS and not result.cured:
            passed.setdefault(result.system, []).append(result)
    found = []
    for issue in report.issues.issues:
        stated = _stated(issue) if issue.system in passed else {}
        candidates = [r for r in passed.get(issue.system, ()) if stated and _has(r, stated)]
        found += [Repaired(issue, r.version, r.id) for r in candidates if _is(r, stated)]
    return tuple(found)


def _stated(issue: KnownIssue) -> dict[str, str]:
    """The axes that an entry's scenario file states; none where it cannot be read."""
    try:
        file = system_named(issue.system).folder.joinpath(issue.scenario)
        if not file.is_file():
            return {}
        table = load_toml(text_of(file, issue.scenario), issue.scenario).get("scenario", {})
    except UsageError:
        return {}
    return {axis: str(value) for axis, value in table.items() if axis not in _WHICHEVER}


def _has(result: Result, stated: Mapping[str, str]) -> bool:
    return stated.items() <= result.scenario.axis_values().items()


def _is(result: Result, stated: Mapping[str, str]) -> bool:
    """Whether a result's scenario is that of a file, with the defaults that stand in for what it leaves out."""
    try:
        whole = completed(stated).axis_values()
    except UsageError:
        return False
    values = result.scenario.axis_values()
    return all(values[axis] == text for axis, text in whole.items() if axis not in _WHICHEVER)
