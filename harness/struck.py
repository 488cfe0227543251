"""What notices a fault outside the library: every boundary fault, planted in a plain scenario of a system.

Of each fault it is said what came of it, which comparison saw it first and at which operation, and whether it got into
the checkpoint. For example, a bit of a parameter that flips after a step is seen at that step, in `param`, and a
checkpoint that is saved next carries it on; of a reduction that is late nothing is seen, as it must be.

*Does not verify* that the fault is noticed by whoever trains: only what the library raises is. Nor that the scenario
passes without the fault, which the conformance kit does; nor, of an error, whether the library or the fault raised it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from harness.errors import UsageError
from harness.faults.boundary import BOUNDARY, BoundaryFault
from harness.faults.strikes import plain_scenario
from harness.laboratory import Laboratory
from harness.observe.record import WRITTEN
from harness.result import Result
from harness.scenario import Scenario
from harness.systems.protocol import System
from harness.systems.registry import all_systems, system_named
from harness.verdict import Verdict

DEADLINE_S = 20.0
"""Of a session, of which some are stuck on purpose."""


@dataclass(frozen=True)
class Struck:
    """A boundary fault in the real ranks of a system, and what came of it."""

    fault: BoundaryFault
    result: Result

    @property
    def outcome(self) -> str:
        """The verdict; `error` where the library raised, so that whoever trains hears of it; `no effect` where nothing
        differs that must, such as a second replica that is struck where there is one."""
        if self.result.verdict is Verdict.CRASH:
            return "error"
        idle = self.result.verdict is Verdict.PASS and self.fault.verdict != "pass"
        return "no effect" if idle else self.result.verdict.value

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
    def plain(self) -> dict[str, object]:
        """Its object of the machine report."""
        return {
            "fault": self.fault.id,
            "system": self.result.system,
            "version": self.result.version,
            "scenario": self.result.id,
            "outcome": self.outcome,
            "seen": self.seen,
            "carried": self.carried,
        }


def strikable(names: Sequence[str]) -> list[System]:
    """The systems of these names.

    Raises:
        UsageError: there is none of that name, or its ranks are simulated.
    """
    able = [system.name for system in all_systems() if system.rank]
    for name in names:
        if not system_named(name).rank:
            raise UsageError.of("--strike", name, able, f"--strike {able[0]}")
    return [system_named(name) for name in names]


def strike(
    systems: Sequence[System], jobs: int, plugins: Sequence[str], told: Callable[[int, int], None]
) -> tuple[list[Struck], bool]:
    """What comes of every boundary fault in the plain scenario of each system.

    Args:
        told: is called with how many faults are done, of how many.

    Returns:
        The faults in the order of the systems' names, and whether an interrupt cut them off.

    Raises:
        HarnessError: a rank's server does not start.
    """
    planted: dict[Scenario, BoundaryFault] = {}
    for system in systems:
        plain = plain_scenario(system)
        planted |= {plain.with_axes({"faults": fault.id}): fault for fault in BOUNDARY.values()}
    found: list[Struck] = []
    with Laboratory(jobs=jobs, deadline_s=DEADLINE_S, plugins=plugins) as laboratory:
        once = partial(laboratory.examine_one, confirm=False)
        with suppress(KeyboardInterrupt):
            for result in laboratory.side_by_side(once, planted):
                found.append(Struck(planted[result.scenario], result))
                told(len(found), len(planted))
    order = list(BOUNDARY)
    found.sort(key=lambda struck: (struck.result.system, order.index(struck.fault.id)))
    return found, len(found) < len(planted)


def table(found: Sequence[Struck]) -> str:
    """One line a fault, below the system that it struck."""
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
        lines.append(f"  {struck.fault.id:<28} {struck.outcome:<9} {carried:<16} {struck.seen}".rstrip())
    return "\n".join(lines)
