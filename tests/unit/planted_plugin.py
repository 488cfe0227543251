"""A plugin that adds a model, a program and three faults: one that is noticed, one that changes nothing, one that ends
the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardproof.faults.catalogue import Fault
from shardproof.faults.logical import override
from shardproof.models import ModelSpec, ModuleSpec, ParamSpec
from shardproof.plugins import register_fault, register_model, register_program

if TYPE_CHECKING:
    from shardproof.reference.numerics import Array
    from shardproof.reference.system import Ranks

AXES = {"model": "of_a_plugin", "program": "save_of_a_plugin", "mesh": "1x2x1", "checkpoint": "sharded"}


def doubled(ranks: Ranks) -> None:
    """Write moments doubled."""

    def export(role: str, values: Array) -> Array:
        written: Array = original(role, values)
        return written if role == "param" else written * 2

    original = override(ranks.saver, "export", export)


def harmless(ranks: Ranks) -> None:
    """Divide by what is divided by anyway."""
    original = override(ranks.trainer, "divisor", lambda shards: original(shards))


def refusing(ranks: Ranks) -> None:
    """Refuse to save."""

    def save(form: str) -> None:
        raise PermissionError(f"no {form} today")

    override(ranks.saver, "save", save)


register_model(ModelSpec("of_a_plugin", "One weight.", (ModuleSpec("one", (ParamSpec("weight", (4, 3)),)),)))
register_program("save_of_a_plugin", "build step save")
for _fault in (
    Fault("plugin-doubled", (), "moments are written doubled", (AXES,), doubled, "wrong-scale"),
    Fault("plugin-harmless", (), "nothing is other than before", (AXES,), harmless),
    Fault("plugin-refusing", (), "a save raises", (AXES,), refusing, "refused"),
):
    register_fault(_fault)
