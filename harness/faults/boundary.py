"""Boundary faults: something outside the library goes wrong on one rank. For any system that runs real ranks.

They show what the harness makes of a lost operation, a broken checkpoint, a dead rank and a stuck one, and, with
a library that promises to survive such a thing, whether it does. Ids start with `boundary.`. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.program import Op
from harness.scenario import Scenario
from harness.systems.protocol import RankContext

Perform = Callable[[], None]

_AXES = {"system": "torch-fsdp2", "mesh": "1x2x1", "program": "build step save step build load step"}


@dataclass(frozen=True)
class BoundaryFault:
    """One fault. around: performs an operation on one rank, with the fault in it. scenario_axes: axes of a scenario
    that shows it. verdict: what it must come to."""

    id: str
    doc: str
    verdict: str
    around: Callable[[Perform, Op, RankContext], None] = field(repr=False)
    scenario_axes: Mapping[str, str] = field(default_factory=lambda: _AXES, hash=False)

    @property
    def scenario(self) -> Scenario:
        """A scenario that shows the fault, with the fault in it."""
        return Scenario().with_axes({**self.scenario_axes, "faults": self.id})


def perform(system_method: Callable[[Op], None], op: Op, context: RankContext) -> None:
    """Perform an operation, with the scenario's boundary faults around it."""
    act: Perform = lambda: system_method(op)  # noqa: E731
    for fault_id in context.scenario.faults:
        if not fault_id.startswith("boundary."):  # a system of a plugin may have faults of its own
            continue
        act = _wrapped(BOUNDARY[fault_id], act, op, context)
    act()


def _wrapped(fault: BoundaryFault, act: Perform, op: Op, context: RankContext) -> Perform:
    return lambda: fault.around(act, op, context)


def _skip_load(act: Perform, op: Op, context: RankContext) -> None:
    if not op.kind.startswith("load"):
        act()


def _flip_bit(act: Perform, op: Op, context: RankContext) -> None:
    """One bit in the middle of the largest stored tensor's file, as a bad disk would."""
    act()
    if op.kind == "save" and context.rank == 0:
        file = _largest(context.checkpoint_path(op))
        data = bytearray(file.read_bytes())
        at = data.find(b"/data/0")  # the name of the first stored tensor; its elements follow, aligned to 64 bytes
        at += 64 + 64 - (at + 64) % 64
        data[at] ^= 1
        file.write_bytes(data)


def _truncate(act: Perform, op: Op, context: RankContext) -> None:
    act()
    if op.kind == "save" and context.rank == 0:
        file = _largest(context.checkpoint_path(op))
        os.truncate(file, file.stat().st_size // 2)


def _largest(folder: Path) -> Path:
    return max((f for f in folder.iterdir() if not f.name.startswith(".")), key=lambda f: f.stat().st_size)


def _kill(act: Perform, op: Op, context: RankContext) -> None:
    if op.kind == "step" and op.iteration == 0 and context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    act()


def _stick(act: Perform, op: Op, context: RankContext) -> None:
    if op.kind == "step" and op.iteration == 0 and context.rank == 0:
        time.sleep(3600)
    act()


BOUNDARY: dict[str, BoundaryFault] = {
    fault.id: fault
    for fault in (
        BoundaryFault("boundary.skip-load", "a load is never called", "mismatch", _skip_load),
        BoundaryFault("boundary.flip-bit", "one bit of a written tensor flips on disk", "mismatch", _flip_bit),
        BoundaryFault("boundary.truncate", "a checkpoint file loses its second half", "crash", _truncate),
        BoundaryFault("boundary.kill-rank", "rank 0 is killed in its first step", "crash", _kill),
        BoundaryFault("boundary.stuck-rank", "rank 0 never returns from its first step", "hang", _stick),
    )
}
