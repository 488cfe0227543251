"""Plants boundary faults, such as a killed rank or a flipped bit, in a plain scenario of each system, and records what
notices each fault.

Of each fault it is said what came of it, which comparison saw it first and at which operation, and whether it got into
the checkpoint. For example, a bit of a parameter that flips after a step is seen at that step, in `param`, and a
checkpoint that is saved next carries it on; of a reduction that is late nothing is seen, as it must be.

*Verifies* that the fault struck: each leaves a note when it does (`shardproof.faults.boundary`).
*Does not verify* that the fault is noticed by whoever trains: only what the library raises is. Nor that the scenario
passes without the fault, which the conformance kit does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardproof.checks.kept import keep
from shardproof.errors import UsageError
from shardproof.faults.boundary import BOUNDARY, BoundaryFault, boundary_fault
from shardproof.faults.memory import moment_called
from shardproof.faults.plain_scenario import struck_scenario
from shardproof.laboratory.laboratory import Laboratory
from shardproof.laboratory.run_verdict import NEVER_STRUCK, NOTHING_IN_IT
from shardproof.observe.record import WRITTEN
from shardproof.program import expand
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.system import System
from shardproof.report.publish import write_json
from shardproof.resilience.progress import Progress
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus, Verdict

DEADLINE_S = 20.0
"""Of a session, of which some are stuck on purpose."""

MOST_EVENTS = 1000
"""How many events of one kind are struck one after the other, at most."""


@dataclass(frozen=True)
class Struck:
    """A boundary fault in the real ranks of one scenario, and what came of it."""

    fault: BoundaryFault
    result: Result

    @property
    def hit(self) -> bool:
        """Whether it found something to strike."""
        return self.result.reason not in (NEVER_STRUCK, NOTHING_IN_IT)

    @property
    def event_occurred(self) -> bool:
        """Whether the run reached the event that the fault strikes, such as the third collective, even if the event
        carried no tensor to corrupt."""
        return self.result.reason != NEVER_STRUCK

    @property
    def number(self) -> int:
        """Which event it strikes, from 2 on; 0 where the fault names none."""
        return int(self.fault.id.partition("@")[2] or 0)

    @property
    def moment(self) -> str:
        """When a fault of memory struck, in words; empty for others, and where it names no moment."""
        return moment_called(self.fault.id, expand(self.result.scenario))

    @property
    def noticed(self) -> bool:
        """Whether it struck, and came to the verdict that it must and to no other."""
        return self.hit and self.result.verdict.value == self.fault.verdict

    @property
    def outcome(self) -> str:
        """The verdict; `error` where an error ended the run, so that whoever trains hears of it; `no effect` where the
        fault found nothing to strike; `unseen` where it struck and nothing differs that must."""
        verdict = self.result.verdict
        if verdict is Verdict.PASS:
            return ("pass" if self.fault.verdict == "pass" else "unseen") if self.hit else "no effect"
        return "error" if verdict is Verdict.CRASH else verdict.value

    @property
    def raised(self) -> str:
        """Whose error ended the run: the library's or the fault's own, or that a rank was lost; empty without one."""
        error = self.result.error
        if self.result.verdict is not Verdict.CRASH or error is None:
            return ""
        return "fault" if error.planted else "rank lost" if error.type == "died" else "library"

    @property
    def seen(self) -> str:
        """Where it was seen first: operation, role and kind of the first difference, or the error's type."""
        first, error = self.result.failed_op, self.result.error
        if first is None:
            return self.result.reason
        at = f"{first.index} {first.name}"
        found = sorted({f"{d.key.role} {d.kind}" for d in self.result.differences if d.key.op == first.index})
        return f"{at}: {', '.join(found)}" if found else f"{at}: {error.type.rpartition('.')[2] if error else ''}"

    @property
    def carried(self) -> bool:
        """Whether a checkpoint holds what is wrong."""
        return any(difference.key.where == WRITTEN for difference in self.result.differences)

    @property
    def line(self) -> str:
        """Its line of the canaries' table; of one that was not noticed, with the reason that the result gives."""
        said = "noticed" if self.noticed else "NOT NOTICED"
        because = f" ({self.result.reason})" if self.result.reason and not self.noticed else ""
        return f"{self.fault.id:<28} {self.result.system:<14} {said}: {self.result.verdict.value}{because}"

    @property
    def plain(self) -> dict[str, object]:
        """Its object of the machine report."""
        return {
            "id": self.fault.id,
            "system": self.result.system,
            "version": self.result.version,
            "scenario": self.result.id,
            "verdict": self.result.verdict.value,
            "detected": self.noticed,
        }

    @property
    def detailed(self) -> dict[str, object]:
        """The same, and what of it is seen where."""
        seen = {"outcome": self.outcome, "raised": self.raised, "seen": self.seen, "carried": self.carried}
        seen |= {"moment": self.moment} if self.moment else {}
        return {**self.plain, **seen}


def strikable(names: Sequence[str]) -> list[System]:
    """The named systems, after a check that boundary faults can be planted in each: only real ranks can be struck.

    Raises:
        UsageError: no system has such a name, or the system simulates its ranks in one process.
    """
    able = [system.name for system in all_systems() if system.rank]
    for name in names:
        if not system_named(name).rank:
            raise UsageError.of("--strike", name, able, f"--strike {able[0]}")
    return [system_named(name) for name in names]


def run_strikes(
    names: Sequence[str],
    out: Path,
    json_file: Path | None,
    jobs: int,
    plugins: Sequence[str],
    *,
    every: bool,
    only: Sequence[str],
) -> int:
    """Strike the systems of these names, keep the results in a folder, print the table; the contract's exit status.

    Args:
        out: the folder. every, only: see `strike`.
    """
    systems = strikable(names)
    with Progress(sys.stderr) as progress:
        progress.stack("faults")
        found, cut_off = strike(systems, jobs, plugins, progress.trials_done, every=every, only=only)
    keep(out, (one.result for one in found))
    print(table(found))
    write_json(json_file, {"struck": [one.detailed for one in found]})
    return ExitStatus.INTERRUPTED if cut_off else ExitStatus.OK


def strike(
    systems: Sequence[System],
    jobs: int,
    plugins: Sequence[str],
    on_progress: Callable[[int, int | None], None],
    *,
    every: bool = False,
    only: Sequence[str] = (),
) -> tuple[list[Struck], bool]:
    """What comes of every boundary fault in a scenario of each system: the first that the system's file names for it,
    or its plain one.

    Args:
        on_progress: is called with how many trials are done, of how many where that is known. every: faults that strike
        one
            of many events strike each of them, until one does not come. only: the faults; all without any.

    Returns:
        The faults in the order of the systems' names, and whether an interrupt cut them off.

    Raises:
        HarnessError: a rank's server does not start.
    """
    planted = [struck_scenario(system, fault) for system in systems for fault in only or BOUNDARY]
    found: list[Struck] = []
    over: set[Scenario] = set()
    ended = False
    with Laboratory(jobs=jobs, deadline_s=DEADLINE_S, plugins=plugins) as laboratory:

        def struck(scenario: Scenario) -> Struck:
            (fault,) = scenario.faults
            return Struck(boundary_fault(fault), laboratory.examine_one(scenario, confirm=False))

        with suppress(KeyboardInterrupt):
            for done, one in enumerate(laboratory.side_by_side(struck, _events(planted, over, every=every)), 1):
                if one.event_occurred or one.result.scenario in planted:
                    found.append(one)
                if not one.event_occurred:
                    over.add(_without_event_number(one.result.scenario))
                on_progress(done, None if every else len(planted))
            ended = True
    order = list(BOUNDARY)
    found.sort(key=lambda one: (one.result.system, order.index(one.fault.id.partition("@")[0]), one.number))
    return found, not ended


def _events(planted: Sequence[Scenario], over: Set[Scenario], *, every: bool) -> Iterator[Scenario]:
    """The scenarios; with `every`, behind one whose fault strikes one of many events, one for each further event, until
    it is among those whose event did not come."""
    for scenario in planted:
        yield scenario
        (first,) = scenario.faults
        if every and (fault := boundary_fault(first)).at:
            for number in range(1 if fault.apart else 2, MOST_EVENTS + 1):
                if scenario in over:
                    break
                yield scenario.with_axes({"faults": f"{first}@{number}"})


def _without_event_number(scenario: Scenario) -> Scenario:
    """The scenario without the number of the event that its fault strikes."""
    (fault,) = scenario.faults
    return scenario.with_axes({"faults": fault.partition("@")[0]})


_RAISED = {"library": "the library raised", "fault": "the fault's own error", "rank lost": "a rank was lost"}


def table(found: Sequence[Struck]) -> str:
    """A plain-text table with one line for each fault, grouped under a heading for each system."""
    lines: list[str] = []
    system = ""
    for struck in found:
        if struck.result.system != system:
            system = struck.result.system
            lines += [
                f"{system} {struck.result.version}".rstrip(),
                f"  {'fault':<28} outcome   in a checkpoint  seen first",
            ]
        carried = "yes" if struck.carried else "-"
        raised = f" ({_RAISED[struck.raised]})" if struck.raised else ""
        lines.append(f"  {struck.fault.id:<28} {struck.outcome:<9} {carried:<16} {struck.seen}{raised}".rstrip())
    return "\n".join(lines)
