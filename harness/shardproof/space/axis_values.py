"""One value of an axis, as the files of spaces and `--set` give it, checked against what exists.

A value that does not exist is often one of another stack: a checkpoint of orbax, an optimizer from PyPI. So the error
ends with the command that takes such a thing (`INSTEAD_OF`). Where it looks like a slip of the keyboard it does not,
and names what was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from shardproof.errors import A_TRAINER, ANY_OPTIMIZER, TWO_CHECKPOINTS, UsageError
from shardproof.faults.requested import require_faults
from shardproof.models import model_spec
from shardproof.plain_values import words
from shardproof.program import is_arms, require_telling
from shardproof.protocol.accepts import Formats, Only
from shardproof.protocol.registry import all_systems, system_named
from shardproof.protocol.system import System
from shardproof.scenario import Mesh, Scenario

INSTEAD_OF = {
    "model": A_TRAINER,
    "dtype": A_TRAINER,
    "optimizer": ANY_OPTIMIZER,
    "checkpoint": f"{A_TRAINER}; {TWO_CHECKPOINTS}",
}
"""Axis → the other way in for who has a value of it that no system has."""


def canonical(axis: str, text: str, systems: Sequence[str] = ()) -> str:
    """The canonical text of an axis value, checked against what exists.

    Args:
        systems: those that the value is meant for, whose words an error lists; without any, those of all systems.

    Raises:
        UsageError: an unknown axis or value.
    """
    try:
        if axis == "model":
            model_spec(text)
        elif axis == "program" and not is_arms(text):
            require_telling(text)
        elif axis == "checkpoint":
            form, *switches = text.split("+")
            _require_words("checkpoint", [form], systems, _formats)
            of_form = f"switch of checkpoint {form!r}"
            _require_words(of_form, switches, systems, lambda system: _formats(system).get(form, ()))
        elif axis in ("options", "load_options") and text != "same":
            _require_words(axis, words(text), systems, lambda system: system.accepts.options)
        elif axis == "faults":
            require_faults({fault for fault in text.split(",") if fault}, what="faults")
        return Scenario.from_axes({axis: text}).axis_text(axis)
    except UsageError as error:
        raise (error.led_to(INSTEAD_OF[axis]) if axis in INSTEAD_OF else error) from None


def _require_words(
    what: str, given: Sequence[str], systems: Sequence[str], words_of: Callable[[System], Collection[str]]
) -> None:
    """Refuse a word that no system has, and list those that the systems asked for have.

    Whether a system takes a word that another one has is a question for its limits, which say why not.
    """
    own = {word for name in systems for word in words_of(system_named(name))}
    if own.issuperset(given):
        return
    every = {word for system in all_systems() for word in words_of(system)}
    unknown = next((word for word in given if word not in every), None)
    if unknown is not None:
        listed = sorted(own or every) or ["none"]
        none = ["none"] if what.endswith("options") else []
        raise UsageError.of(what, unknown, dict.fromkeys([*none, *listed]), listed[0])


def _formats(system: System) -> Mapping[str, Collection[str]]:
    """The formats of checkpoints that a system has, each with the switches that may follow it."""
    forms = system.accepts.axes.get("checkpoint")
    if isinstance(forms, Formats):
        return forms.switches
    texts = map(str, forms.values) if isinstance(forms, Only) else [Scenario().checkpoint]
    parts = [text.split("+") for text in texts]
    return {form: switches for form, *switches in parts}


def meshes(world: int) -> list[Mesh]:
    """Every mesh up to a world size, smallest world first."""
    sizes = range(1, world + 1)
    found = [Mesh(r, s, t) for r in sizes for s in sizes for t in sizes if r * s * t <= world]
    return sorted(found, key=lambda mesh: (mesh.world, mesh))
