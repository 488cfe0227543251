"""What a step does to gradients: how often a backward runs and an optimizer steps, and what becomes of the gradients
between the two, as by a clip, a loss scale, or a division by a count.

Of each gradient two numbers are kept, right after the latest backward and right before the optimizer steps: the sum of
its squares, and a sum that weighs every element otherwise. Where both say the same factor, it was multiplied by it.

*Does not see* gradients that are not in `.grad`, as of engines that keep them elsewhere; the first step of an optimizer
that is no attribute of the trainer, before which nobody knows its parameters; steps inside of a graph that
`torch.compile` made.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import MEASURED
from shardproof.trainer.rank.pieces import Held
from shardproof.trainer.step.measured import BACKWARD, Size

MOST_ELEMENTS = 1 << 20
"""Of a gradient; of larger ones nothing is measured."""


class Measured:
    """What there was since the latest record.

    backwards, steps: how often a backward ran, and an optimizer of each class stepped; events: in which order. idle:
    classes of optimizers that were told to step while none of their parameters had a gradient. rates: the learning
    rates of the param groups in the latest of these steps; None of one that is no number; every_rate: in any of them,
    each once. gradients:
    identity of a parameter → size of its gradient after the latest backward, and before the step that came then.
    stale: those whose gradient was, when a backward began, still the one that an optimizer had stepped with,
        and that were stepped again without having been cleared. _not_cleared: those that may come to it.
    mixed: those that an optimizer stepped with and that two backwards have made, of which the first reached its
        parameters alone, and the second those of another optimizer too.
    """

    def __init__(self) -> None:
        self._last = dict[int, Size]()  # of the gradients that an optimizer stepped with latest
        self._parameters: dict[int, ReferenceType[torch.Tensor]] = {}
        self._owners = dict[int, int]()  # of a parameter, the identity of its optimizer
        self._made_by = dict[int, list[int]]()  # of a gradient, the numbers of the backwards that it is made of
        self._reached = dict[int, set[int]]()  # by the number of a backward, the gradients that it has changed
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.backwards, self._backwards_before, self.steps = 0, 0, Counter[str]()
        self.events = list[str]()
        self._inside, self._held_before, self._gradients_before = 0, list[Size | None](), dict[int, Size]()
        self.gradients = dict[int, tuple[Size, Size]]()
        self.rates, self.every_rate, self.idle = list[float | None](), list[float | None](), set[str]()
        self.mixed = set[int]()
        self._made_by, self._reached = {}, {}
        self.stale, self._not_cleared, self._after = set[int](), set[int](), dict[int, Size]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, backwards and steps are looked at."""
        hooks = [register_optimizer_step_pre_hook(self._steps), register_optimizer_step_post_hook(self._stepped)]
        plain = torch.autograd.backward

        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> None:
            inner = torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1  # as of a checkpoint
            before = self._begins() if not inner else {}
            plain(*args, **kwargs)
            if not inner:
                self.backwards += 1
                self.events.append(BACKWARD)
                self._after = self._sizes(self._parameters)
                self._reach(before)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = plain
            for hook in hooks:
                hook.remove()

    def know(self, found: Iterable[object]) -> None:
        """Take the parameters of the optimizers among some objects, so that the first step can be measured too."""
        for optimizer in found:
            if isinstance(optimizer, torch.optim.Optimizer):
                own = _parameters_of(optimizer)
                self._parameters |= own
                self._owners |= dict.fromkeys(own, id(optimizer))

    def known(self) -> Mapping[int, ReferenceType[torch.Tensor]]:
        """The parameters of the optimizers that are known so far, by identity."""
        return self._parameters

    def record(self, op: int, rank: int, parameters: Mapping[int, Held]) -> Record:
        """What was seen as a record that is not compared; what follows begins anew.

        Args:
            parameters: of modules, by identity.
        """
        own = {key: called(held) for key, held in parameters.items()}
        now = self._sizes(self._parameters)
        waiting = [key for key, size in now.items() if any(size) and size != self._last.get(key)]
        gradients = {
            own[key]: [*after, *before, _is_shared_out(parameters[key]), self._copies(key)]
            for key, (after, before) in self.gradients.items()
            if key in own
        }
        told = {
            "backwards": self.backwards, "steps": self.steps, "events": self.events,
            "gradients": gradients, "rates": self.rates, "idle": sorted(self.idle),
            "every_rate": self.every_rate, "mixed": sorted(own[key] for key in self.mixed if key in own),
            "stale": sorted(own[key] for key in self.stale if key in own),
            "waiting": sorted(own[key] for key in waiting if key in own),
        }  # fmt: skip
        self._begin_anew()
        data = json.dumps(told).encode()
        return whole(op, rank, MEASURED, "", "utf8", (len(data),), data)

    def _begins(self) -> dict[int, Size]:
        """Look for gradients of the step before that nobody has cleared. What gradients are, if there are several
        optimizers, is returned."""
        self._after = {}
        first, several = not self.backwards and not self.steps, len({*self._owners.values()}) > 1
        now = self._sizes(self._parameters) if first or several or self._not_cleared else {}
        if first:
            self._not_cleared = {key for key, size in now.items() if any(size) and size == self._last.get(key)}
        elif self._not_cleared:  # those of an actor, say, that are cleared before its own backward, do not count again
            self._not_cleared &= {key for key, size in now.items() if any(size)}
        return now if several else {}

    def _reach(self, before: Mapping[int, Size]) -> None:
        """Keep which gradients the latest backward has changed, if there are several optimizers."""
        if len({*self._owners.values()}) < 2:
            return
        changed = {key for key, size in self._after.items() if any(size) and size != before.get(key)}
        self._reached[self.backwards] = changed
        for key in changed:
            made = any(before.get(key, ())) and key in self._made_by
            self._made_by[key] = [*(self._made_by[key] if made else ()), self.backwards]

    def _mixed(self, own: Collection[int]) -> set[int]:
        """The gradients of an optimizer that are made of a backward of its own and of one that reaches another's."""
        return {
            key for key in own if len(made := self._made_by.get(key, [])) > 1 and self._reached[made[0]] <= {*own}
            and any(not self._reached[number] <= {*own} for number in made[1:])
        }  # fmt: skip

    def _steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep what an optimizer has when it begins to step."""
        if torch.compiler.is_compiling():
            return
        self._inside += 1
        if self._inside > 1:  # of a class that calls the `step` of the one it derives from
            return
        self._backwards_before = self.backwards
        self._held_before = _sizes_of(optimizer)
        self._gradients_before = self._sizes(_parameters_of(optimizer))

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step that changed a parameter or a state, which one that returns early does not, and keep the
        gradients that the optimizer had: those of now, if it made them itself, by a closure with a backward."""
        if torch.compiler.is_compiling():
            return
        self._inside = max(self._inside - 1, 0)
        if self._inside:
            return
        if self._held_before == _sizes_of(optimizer):
            if not any(any(size) for size in self._gradients_before.values()):
                self.idle.add(type(optimizer).__name__)
            return
        self.steps[type(optimizer).__name__] += 1
        self.events.append(type(optimizer).__name__)
        self.rates = [_rate(group.get("lr")) for group in optimizer.param_groups]
        self.every_rate += [rate for rate in self.rates if rate not in self.every_rate]
        own = _parameters_of(optimizer)
        self._owners |= dict.fromkeys(own, id(optimizer))
        self.mixed |= self._mixed(own)
        before = self._sizes(own) if self.backwards > self._backwards_before else self._gradients_before
        self.gradients |= {key: (self._after[key], size) for key, size in before.items() if key in self._after}
        self.stale |= {key for key in self._not_cleared & before.keys() if any(before[key])}
        self._last |= before
        self._parameters |= own

    def _sizes(self, parameters: Mapping[int, ReferenceType[torch.Tensor]]) -> dict[int, Size]:
        found: dict[int, Size] = {}
        for key, held in parameters.items():
            parameter = held()
            size = _size(parameter.grad) if parameter is not None else None
            if size is not None:
                found[key] = size
        return found

    def _copies(self, key: int) -> int:
        """How many ranks have the same elements of a parameter."""
        parameter = self._parameters[key]()
        if not isinstance(parameter, DTensor):
            return 1
        places = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        return prod(size for placement, size in places if isinstance(placement, Replicate))


def _is_shared_out(held: Held) -> bool:
    """Whether other ranks hold the rest of the tensor. What a trainer calls `local` is whole on each rank."""
    return not held.own and not held.whole


def called(held: Held) -> str:
    """The name of a parameter, or of several that one flat one joins."""
    (first, *_), *others = held.names
    return f"{first} and {len(others)} more" if others else first


def _sizes_of(optimizer: torch.optim.Optimizer) -> list[Size | None]:
    """The sizes of an optimizer's parameters and their state, by which a step that changed nothing is told."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = (optimizer.state.get(parameter, {}) for parameter in parameters)
    beside = [value for own in state if isinstance(own, dict) for value in own.values()]
    return [_size(one) for one in (*parameters, *beside) if isinstance(one, torch.Tensor)]


def _rate(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def _parameters_of(optimizer: torch.optim.Optimizer) -> dict[int, ReferenceType[torch.Tensor]]:
    return {id(parameter): ref(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def weights_for(last: torch.Tensor) -> torch.Tensor:
    """Another number for each place of the last dim, so that a sum with them tells the sign and the order.

    Args:
        last: (..., numbers), of floats.
    """
    return torch.arange(1.0, last.shape[-1] + 1, dtype=last.dtype, device=last.device).cos()


def _size(gradient: torch.Tensor | None) -> Size | None:
    if gradient is None:
        return None
    try:
        with torch.no_grad():
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local.numel() > MOST_ELEMENTS:
                return None
            own = local.detach().reshape(-1).to(torch.float64)
            return float(own.square().sum()), float((own * weights_for(own)).sum())
    except Exception:  # of a kind that has no such operator
        return None
