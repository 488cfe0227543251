"""One value of an axis, as the files of spaces and `--set` give it, checked against what exists.

A value that does not exist is often one of another stack: a checkpoint of orbax, an optimizer from PyPI. So the error
ends with the command that takes such a thing (`INSTEAD_OF`).
"""

from __future__ import annotations

from shardproof.errors import A_TRAINER, ANY_OPTIMIZER, TWO_CHECKPOINTS, UsageError
from shardproof.models import model_spec
from shardproof.program import is_arms, require_telling
from shardproof.scenario import Mesh, Scenario

INSTEAD_OF = {"model": A_TRAINER, "dtype": A_TRAINER, "optimizer": ANY_OPTIMIZER, "checkpoint": TWO_CHECKPOINTS}
"""Axis → the other way in for who has a value of it that no system has."""


def canonical(axis: str, text: str) -> str:
    """The canonical text of an axis value, checked against what exists.

    Raises:
        UsageError: an unknown axis or value.
    """
    try:
        if axis == "model":
            model_spec(text)
        elif axis == "program" and not is_arms(text):
            require_telling(text)
        return Scenario.from_axes({axis: text}).axis_text(axis)
    except UsageError as error:
        raise (error.led_to(INSTEAD_OF[axis]) if axis in INSTEAD_OF else error) from None


def meshes(world: int) -> list[Mesh]:
    """Every mesh up to a world size, smallest world first."""
    sizes = range(1, world + 1)
    found = [Mesh(r, s, t) for r in sizes for s in sizes for t in sizes if r * s * t <= world]
    return sorted(found, key=lambda mesh: (mesh.world, mesh))
