"""Arms: the training runs from which the questions about an optimizer are answered. Each is a scenario and an `Arm`.

An arm is read by the ranks from a file in the scenario's folder. For example, the arm `cut` of a position question is
run by one process on whole tensors, which it first cuts into the rows that two ranks would hold; the scenario beside it
names the model and says `build step step step step`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.optimizers.request import Asked
from shardproof.optimizers.system import NAME
from shardproof.scenario import Mesh, Scenario

FILE = "arm.json"
STEPS = "build step step step step"
SAVED = "build step step save step restart build load step"
SAVE, LOAD = 3, 6
"""Indices of the two operations in `SAVED`; the step after each is the next one."""

HALVED_AT = 1
"""In arms that change the learning rate, the iteration before which it is halved, as a schedule does it."""


@dataclass(frozen=True)
class Arm:
    """What the axes of a scenario cannot say of a run.

    * path, arguments: `Asked`.
    * ranks: the mesh whose gradients are drawn; a run on whole tensors gets their mean over these ranks.
    * whole: one process steps whole tensors, and nothing is sharded.
    * arrangement: of whole tensors: as they are; each `cut` into the rows that the ranks would hold; or `reversed`, the
      last element first.
    * groups: `one` param group; `two` with settings of their own, every other parameter in the second; or `apart`, the
      same two groups in two optimizers.
    * lr: the learning rate is a `float` or a `tensor`.
    * halves: whether the learning rate is halved before iteration `HALVED_AT`.
    """

    path: str
    arguments: tuple[tuple[str, str], ...]
    ranks: str
    whole: bool = False
    arrangement: str = ""
    groups: str = "one"
    lr: str = "float"
    halves: bool = False

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> Arm:
        """The arm of a scenario's folder."""
        found: dict[str, Any] = json.loads((folder / FILE).read_text("utf-8"))
        return cls(**{**found, "arguments": tuple((name, text) for name, text in found["arguments"])})


@dataclass(frozen=True)
class ArmRun:
    """One run: an arm, and the axes of its scenario that are not the default."""

    arm: Arm
    model: str
    program: str = STEPS
    axes: tuple[tuple[str, str], ...] = ()

    @property
    def scenario(self) -> Scenario:
        mesh = str(Mesh()) if self.arm.whole else self.arm.ranks
        own = {"system": NAME, "model": self.model, "program": self.program, "mesh": mesh}
        return Scenario.from_axes(own | dict(self.axes))

    def but(self, *, program: str | None = None, model: str | None = None, **changes: Any) -> ArmRun:
        """The same with another program or model, or an arm with these changes."""
        return replace(
            self, arm=replace(self.arm, **changes), program=program or self.program, model=model or self.model
        )

    def under(self, **axes: str) -> ArmRun:
        """The same with further axes."""
        return replace(self, axes=tuple((dict(self.axes) | axes).items()))


def first(asked: Asked, ranks: Mesh, model: str) -> ArmRun:
    """The run on whole tensors that every other one is compared with."""
    return ArmRun(Arm(asked.path, asked.arguments, str(ranks), whole=True), model)


def loaded_elsewhere(mesh: Mesh) -> str:
    """The load relation of a checkpoint that is read on another number of ranks: twice as many, or half of eight."""
    return "grow" if 2 * mesh.world <= 8 else "shrink"
