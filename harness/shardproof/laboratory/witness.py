"""Runs the scenario of a known issue on a head, to see whether the defect is present there with the same mechanism.

A defect without a cure is known by its face, on releases that were walked one by one. On a head a face says less. The
defect may be repaired there, and something new may look like it: of eight failures of core_v0.19.0 with the face of
`fsdp-one-rank`, seven were another defect. So the entry's own scenario is asked, once for each head:

* It passes: what looks like the entry is something else.
* It fails by a mechanism that the failure does not show: likewise.
* It fails as the entry says, and no mechanism speaks against it: known, by face.

An entry with `behind` has no face, since other defects end every scenario before it shows. Where those are cured and
its own cure no longer fits the tree, it shows: then what fails as its scenario does is known by that.

*Does not verify*: that two failures by one mechanism have one cause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from shardproof.issues.cures import REPAIRED
from shardproof.issues.known_issues import KnownIssue
from shardproof.protocol.registry import system_named
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.tables import text_of
from shardproof.verdict import Verdict

Witness = Callable[[KnownIssue, Result], Result]
"""What the scenario of an entry shows on the library that a result ran on."""


class Witnesses:
    """The scenarios of entries, each run once for each library. May be called from several threads.

    Args:
        examine: runs a scenario once.
    """

    def __init__(self, examine: Callable[[Scenario], Result]) -> None:
        self._examine = examine
        self._lock = threading.Lock()
        self._seen: dict[Scenario, Future[Result]] = {}

    def __call__(self, issue: KnownIssue, result: Result) -> Result:
        """What the issue's own scenario shows with the release and the cures of a result."""
        scenario = replace(scenario_of(issue), version=result.scenario.version, device=result.scenario.device)
        with self._lock:
            found = self._seen.get(scenario)
            first = found is None
            if found is None:
                found = self._seen[scenario] = Future()
        if first:
            try:
                found.set_result(self._examine(scenario))
            except BaseException as error:
                found.set_exception(error)
        return found.result()


def scenario_of(issue: KnownIssue) -> Scenario:
    """The scenario that shows an issue."""
    system = system_named(issue.system)
    return Scenario.from_toml(text_of(system.folder.joinpath(issue.scenario), f"{issue.system}/{issue.scenario}"), "")


@dataclass(frozen=True)
class Doubt:
    """An entry that a failure looks like and is not, and why."""

    issue: KnownIssue
    why: str


def contradicted(found: Iterable[KnownIssue], result: Result, witness: Witness) -> Doubt | None:
    """The first entry that a failure on a head is not, though it has its face; None where nothing speaks against it."""
    for issue in found:
        own = witness(issue, result)
        if own.verdict is Verdict.PASS:
            return Doubt(issue, f"it looks like known issue {issue.id}, whose own scenario passes here")
        here, there = _mechanisms(result), _mechanisms(own)
        if here and there and here.isdisjoint(there):
            shown = f"shows {', '.join(sorted(there))} here, and not {', '.join(sorted(here))}"
            return Doubt(issue, f"it looks like known issue {issue.id}, whose own scenario {shown}")
    return None


def hidden(entries: Iterable[KnownIssue], result: Result, witness: Witness) -> list[KnownIssue]:
    """The entry without a face that a failure is due to, where the entry's cure was to be there and does not fit."""
    for issue in entries:
        stale = result.not_cured.get(issue.cure, REPAIRED) != REPAIRED
        if issue.system == result.system and stale and witness(issue, result).signature == result.signature:
            return [issue]
    return []


def _mechanisms(result: Result) -> set[str]:
    return {explanation.mechanism for explanation in result.explanations}
