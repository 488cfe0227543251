"""The gradients that arrive at values which statements make, as a backward comes by.

A hook on a tensor is the one thing here that torch is asked for while a step runs: it reads the gradient and gives
nothing back, so that the backward goes on with what it had.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from shardproof.trainer.rank.looked_up import told

MOST_HOOKS = 400
"""Values of an operation on one rank at which gradients are looked at."""

Place = tuple[str, int, str]


class Flows:
    """Gradients that arrived since the latest record.

    arrived: the place of the statement that made a value, the path of it, and the text that tells the gradient, in the
    order of the backward. unknown: place and path of a value at which gradients are not looked at, such as a tensor
    that another statement made. keep: is given each text with its gradient.
    """

    def __init__(self, keep: Callable[[str, object], None]) -> None:
        self.keep = keep
        self.arrived = list[tuple[Place, str, str]]()
        self.unknown = list[tuple[Place, str]]()
        self.hooks = 0

    def follow(self, value: object, place: Place, path: str) -> None:
        """Look at the gradient of a tensor that a statement made, if a backward may come by."""
        if not isinstance(value, torch.Tensor) or (type(value) is torch.Tensor and not value.requires_grad):
            return  # to which no gradient comes
        hooks = value._backward_hooks or {}
        again = any(isinstance(each, partial) and each.func == self._arrives for each in hooks.values())
        plain = type(value) is torch.Tensor and value.grad_fn is not None
        if again or not plain or self.hooks >= MOST_HOOKS:
            self.unknown.append((place, path))
            return
        self.hooks += 1
        hook = partial(self._arrives, place, path)
        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # so that torch.save does not warn of it
        value.register_hook(hook)  # type: ignore[no-untyped-call]

    def _arrives(self, place: Place, path: str, gradient: torch.Tensor) -> None:
        with suppress(Exception):  # nothing of ours may end a backward
            if said := told(gradient):
                self.keep(said, gradient)
                self.arrived.append((place, path, said))

    def taken(self) -> tuple[list[tuple[Place, str, str]], list[tuple[Place, str]]]:
        """Return the gradients that arrived and the values at which none is looked at, and begin anew."""
        found = self.arrived, self.unknown
        self.arrived, self.unknown, self.hooks = [], [], 0
        return found
