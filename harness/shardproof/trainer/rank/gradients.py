"""What an optimizer of torch has of each parameter at the moment that it steps: a gradient, none, zeros, or one
although the parameter is frozen. And which parameters are frozen after the step, or have a gradient when an optimizer
steps that has not got them.

*Does not see* optimizers that are no `torch.optim.Optimizer`, and steps inside of a graph that `torch.compile` made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import GRADIENTS
from shardproof.trainer.rank.pieces import Held
from shardproof.trainer.values.gradients import (
    COPIES,
    FROZEN,
    GRADIENT,
    LEAST_FIRST,
    NONE,
    NOT_FINITE,
    STEPPED_FROZEN,
    UNSTEPPED,
    ZEROS,
)  # fmt: skip


class Gradients:
    """What was seen since the latest record: identity of a parameter → one of the words of `trainer.gradients`.

    of_modules: those of modules that are known, each by a function that gives it.
    """

    def __init__(self, of_modules: Callable[[], Mapping[int, Callable[[], torch.Tensor | None]]] = dict) -> None:
        self.of_modules = of_modules
        self.seen: dict[int, str] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, every step of an optimizer is looked at before it is taken."""
        hook = register_optimizer_step_pre_hook(self._look)
        try:
            yield
        finally:
            hook.remove()

    def record(self, op: int, rank: int, parameters: Mapping[int, Held], frozen: set[int]) -> Record:
        """What was seen as a record that is not compared, by the names of parameters of modules, and of all others that
        an optimizer steps together.

        Args:
            parameters: by identity. frozen: of those, which have `requires_grad=False` now.
        """
        told = {names[0]: self.seen.get(identity, FROZEN if identity in frozen else "")
                for identity, held in parameters.items() for names in held.names}  # fmt: skip
        copies = [
            GRADIENT if word == STEPPED_FROZEN else word for key, word in self.seen.items() if key not in parameters
        ]
        told[COPIES] = max(copies, key=LEAST_FIRST.index, default="")
        self.seen = {}
        data = json.dumps({name: word for name, word in told.items() if word}).encode()
        return whole(op, rank, GRADIENTS, "", "utf8", (len(data),), data)

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                word = _word(parameter)
                if word and self.seen.get(id(parameter), NONE) in LESS:  # one of several steps had more
                    self.seen[id(parameter)] = word
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for key, held in self.of_modules().items():
            parameter = held()
            if key not in stepped and key not in self.seen and parameter is not None and _waits(parameter):
                self.seen[key] = UNSTEPPED


LESS = (NONE, ZEROS, UNSTEPPED)
"""What an optimizer had less of a parameter than a gradient."""


def _waits(parameter: torch.Tensor) -> bool:
    """Whether a parameter that an optimizer does not step has a gradient that is not zero."""
    return parameter.requires_grad and parameter.is_leaf and _word(parameter) == GRADIENT


def _word(parameter: torch.Tensor) -> str:
    gradient = parameter.grad
    if not parameter.requires_grad:
        return "" if gradient is None else STEPPED_FROZEN
    if gradient is None:
        return NONE
    try:
        with torch.no_grad():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if not torch.isfinite(local).all():
                return NOT_FINITE
            return GRADIENT if torch.any(local != 0) else ZEROS
    except Exception:  # of a kind that has no such operator: that there is one is known
        return GRADIENT
