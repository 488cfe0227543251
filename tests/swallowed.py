"""Which known issues swallow a planted fault: `python -m tests.swallowed torch-fsdp2 megatron-core`.

An entry of `issues.toml` without a cure, and without a release that repaired it, is told by its face alone. So a second
defect that shows in the same scenario may be counted as the first. Here each such entry's own scenario runs once as it
is, and once with each fault of memory and of a collective, at the moments around the operation that shows the entry.
The fault is swallowed where the values that differ are others than before, and the result is known all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile

from shardproof.issues.known_issues import KnownIssue, KnownIssues, known_issues_of
from shardproof.laboratory.laboratory import Laboratory
from shardproof.laboratory.witness import scenario_of
from shardproof.program import STEPS, Op, expand
from shardproof.protocol.registry import system_named
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.versions import with_cures

GO_ON = ("step", "step save build load step")
"""What a program goes on with, so that a fault behind what shows an entry is one of its aftermath."""


@dataclass(frozen=True)
class Planted:
    """A fault in an entry's scenario. struck: whether it changed a value that differs. known: the ids of the entries
    that the result counts as."""

    issue: str
    scenario: Scenario
    fault: str
    struck: bool
    known: str

    @property
    def swallowed(self) -> bool:
        """Whether nobody would hear of the fault."""
        return self.struck and bool(self.known)


def told_by_face(system: str) -> list[KnownIssue]:
    """The entries of a system that have no cure, and that no later release has repaired."""
    return [issue for issue in known_issues_of(system_named(system)) if not issue.cure and not issue.repaired]


def moments(ops: Sequence[Op], shown: int) -> Iterator[str]:
    """The faults of memory right before and after the operation that shows an entry, of a parameter until the next
    step, and of the gradients of the first step from there on; and one of the first collective. A parameter that a step
    has moved by wrong state is wrong anyway, and nothing tells a flipped bit in it."""
    for name in ("param", "moment", "step"):
        yield f"boundary.memory-{name}@{2 * shown + 1}"
        yield f"boundary.memory-{name}@{2 * shown + 2}"
    quiet = takewhile(lambda op: op.kind not in STEPS, ops[shown + 1 :])
    yield from (f"boundary.memory-param@{2 * op.index + 2}" for op in quiet)
    steps = [op.index for op in ops if op.kind in STEPS]
    later = [number for number, index in enumerate(steps, 1) if index >= shown]
    yield from (f"boundary.memory-gradient@{number}" for number in later[:1])
    yield "boundary.collective-flip"


def planted(issues: Iterable[KnownIssue], laboratory: Laboratory) -> Iterator[Planted]:
    """What comes of every fault in the scenario of every entry, side by side."""
    with ThreadPoolExecutor(laboratory.jobs) as threads:
        for found in threads.map(lambda issue: list(_planted_in(issue, laboratory)), issues):
            yield from found


def cells(issue: KnownIssue) -> list[Scenario]:
    """The scenario of an entry, and the same where its optimizer clips or in programs that go on, as far as the entry
    says that it shows there; on a library that is cured of all other defects."""
    own = scenario_of(issue)
    own = replace(own, version=with_cures(own.release, ""))
    further = (
        [own.with_axes({"optimizer": f"{own.axis_values()['optimizer']}/clip=1.0"})]
        if own.optimizer.clip is None
        else []
    )
    further += [own.with_axes({"program": f"{own.program} {more}"}) for more in GO_ON]
    return [own, *(cell for cell in further if issue.match.applies(cell, own.release))]


def _planted_in(issue: KnownIssue, laboratory: Laboratory) -> Iterator[Planted]:
    known = KnownIssues(known_issues_of(system_named(issue.system)))
    for scenario in cells(issue):
        plain = laboratory.examine_one(scenario, confirm=False)
        if not plain.differences or known.match(plain) is None:
            continue  # it raises, another release has it, or another defect shows
        shown = min(difference.key.op for difference in plain.differences)
        for fault in moments(expand(scenario), shown):
            result = laboratory.examine_one(_with(scenario, fault), confirm=False)
            struck = bool(result.differences) and _values(result) != _values(plain)
            yield Planted(issue.id, scenario, fault, struck, known.match(result) or "")


def _with(scenario: Scenario, fault: str) -> Scenario:
    return scenario.with_axes({"faults": fault})


def _values(result: Result) -> set[tuple[object, ...]]:
    return {(d.key, d.kind, d.observed_digest) for d in result.differences} | {(result.verdict,)}


def main() -> None:
    """Print what the systems named on the command line swallow."""
    for name in sys.argv[1:]:
        with Laboratory(jobs=3, deadline_s=60) as laboratory:
            found = list(planted(told_by_face(name), laboratory))
        struck = [each for each in found if each.struck]
        lost = [each for each in struck if each.swallowed]
        print(f"{name}: {len(found)} planted, {len(struck)} struck, {len(lost)} swallowed")
        for each in lost:
            print(f"  {each.issue}, {each.scenario.program}: {each.fault} counts as {each.known}")


if __name__ == "__main__":
    main()
