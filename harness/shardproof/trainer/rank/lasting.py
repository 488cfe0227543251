"""Statements that write tensors which last from step to step beside parameters and buffers: what an optimizer keeps,
averages, and other tensors of the trainer's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from shardproof.trainer.rank import kinds
from shardproof.trainer.rank.found import State
from shardproof.trainer.rank.marks import known, mark_of
from shardproof.trainer.values.every_mesh import ROLES, of_lasting

MOST, MOST_BYTES = 200, 1 << 20
"""Tensors that are looked at between two lines, and their bytes in all; with more, none is, since parameters and
gradients come first in the time that an operation has for its lines."""

Tensors = Callable[[], Mapping[str, torch.Tensor]]


class Lasting:
    """Marks of tensors that last, and the statements that changed them. tensors: those to look at, by name."""

    def __init__(self) -> None:
        self.tensors: Tensors = dict
        self._marks: dict[str, object] = {}
        self._found: dict[tuple[str, int, str], list[str]] = {}

    def begin(self) -> None:
        """Take the marks of all tensors as they are now."""
        self._marks = self._seen()

    def look(self, place: tuple[str, int, str]) -> None:
        """Keep what a statement has changed, or made in an optimizer."""
        before, self._marks = self._marks, self._seen()
        written = [name for name, mark in self._marks.items() if mark != before.get(name)]
        if written:
            self._found.setdefault(place, []).extend(written)

    def taken(self) -> dict[tuple[str, int, str], list[str]]:
        """Return what was found since the latest call: place → names, each as often as it was written."""
        found, self._found = self._found, {}
        return found

    def _seen(self) -> dict[str, object]:
        every = self.tensors()
        few = len(every) <= MOST and sum(one.nbytes for one in every.values()) <= MOST_BYTES
        return {name: known(mark_of(one)) for name, one in every.items()} if few else {}


def lasting(state: State) -> Tensors:
    """Tensors of the state that was found, and of optimizers' states as they are when this is called."""
    own = {met.path: met.value for met in state.way.met if met.kind == kinds.TENSOR and torch.is_tensor(met.value)}
    held = {id(one) for place in state.buffers.values() if (one := place()) is not None}
    own = {
        path: one
        for path, one in (state.leaves | own).items()
        if id(one) not in state.parameters and id(one) not in held
    }
    optimizers = [one.target for one in state.optimizers]
    names = {identity: parameter.names[0][0] for identity, parameter in state.parameters.items() if parameter.names}

    def tensors() -> dict[str, torch.Tensor]:
        kept = {
            of_lasting(ROLES[key], names[id(parameter)]): value
            for optimizer in optimizers
            for parameter, values in getattr(optimizer, "state", {}).items()
            if id(parameter) in names and isinstance(values, Mapping)
            for key, value in values.items()
            if torch.is_tensor(value) and key in ROLES and value.numel() > 1
        }
        return own | kept

    return tensors
