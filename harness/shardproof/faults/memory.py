"""Faults of memory: one bit of what a rank keeps flips at a given moment, as a bad memory module would do it.

Which tensor of the rank it is, and when, decides whether it is seen, and whether a checkpoint carries it on. A
parameter is written anew by the next step where masters are kept, a moment is mixed into every later step, a load
writes over all of them, and a checkpoint that is saved in between holds whichever is wrong. Without a number it is
after the first step. With one it is before or after an operation: 1 is before the first one, 2 after it, 3 before the
second one, and so on. A gradient is kept from the backward pass to the step only; it flips when the optimizer is about
to read it, without a number for the first time, else for the N-th. Ids start with `boundary.memory-`. Imports torch in
ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from shardproof.faults.ranks import Around
from shardproof.program import Op
from shardproof.protocol.system import RankContext, RankSystem

_MEMORY = "boundary.memory-"
GRADIENT = f"{_MEMORY}gradient"
_BIT = 8
"""Which bit of the byte below the highest one: one of the mantissa, in fp32, bf16 and fp16 alike."""
_GRADIENTS = ("grad", "decoupled_grad")
"""Where an optimizer reads a gradient; FusedAdam has one of its own for gradients in another dtype."""


def flip_in(name: str) -> Around:
    """A fault's `around` that flips a bit of rank 0's first element after its first step.

    Args:
        name: "param", or the key of an optimizer's state, such as "exp_avg".
    """
    return _flipping(name, lambda op, after: after and _first_step(op))


def flip_at(name: str) -> Callable[[int], Around]:
    """What gives the `around` of the same fault at a moment, by number."""
    return lambda number: _flipping(name, lambda op, after: moment_of(op, after=after) == number)


def stray_key() -> Around:
    """The `around` of the fault that puts a key which no optimizer knows into the live param groups of rank 0 after its
    first step, as a load that leaves another library's settings there does."""
    made: list[Any] = []

    def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
        with _noted(made) if op.kind == "build" and not context.rank else nullcontext():
            act()
        if _first_step(op) and not context.rank:
            context.event_occurred()
            for group in (group for optimizer in made for group in optimizer.param_groups):
                group["stray"] = 1.0
                context.struck()

    return around


def _first_step(op: Op) -> bool:
    return op.kind == "step" and not op.iteration


def moment_of(op: Op, *, after: bool) -> int:
    """The number of the moment before or after an operation."""
    return 2 * op.index + (2 if after else 1)


def moment_called(fault_id: str, ops: tuple[Op, ...]) -> str:
    """When a fault of memory strikes, in words, such as `after 1 step`; empty for one that names no moment, and for
    faults of other kinds.

    Args:
        ops: of the scenario in which it is.
    """
    name, _, number = fault_id.partition("@")
    if name == GRADIENT:
        return f"optimizer's step {number or 1}"
    if not name.startswith(_MEMORY) or not number:
        return ""
    op = ops[min((int(number) - 1) // 2, len(ops) - 1)]
    return f"{'before' if int(number) % 2 else 'after'} {op.index} {op.kind}"


def flip_gradient(number: int) -> Around:
    """A fault's `around` that flips a bit of rank 0's first gradient when its optimizer is about to read it for the
    N-th time."""
    steps = 0

    def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
        nonlocal steps

        def step(optimizer: Any) -> None:
            nonlocal steps
            gradient = next(gradients_of(optimizer), None)
            steps += gradient is not None
            if gradient is not None and steps == number:
                context.event_occurred()
                _flip_kept(gradient, context)

        with nullcontext() if context.rank else at_optimizer(step):
            act()

    return around


@contextmanager
def at_optimizer(about_to_step: Callable[[Any], None]) -> Iterator[None]:
    """Have a function called with each of torch's optimizers right before it steps: what any library steps in the end,
    with its gradients in place."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: about_to_step(optimizer))
    try:
        yield
    finally:
        hook.remove()


def gradients_of(optimizer: Any) -> Iterator[Any]:
    """The parts of gradients with elements that this rank is about to step with."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            for name in _GRADIENTS:
                yield from _local(getattr(param, name, None))


def _flipping(name: str, strikes: Callable[[Op, bool], bool]) -> Around:
    made: list[Any] = []

    def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
        if context.rank:
            act()
            return

        def moment(*, after: bool) -> None:
            if strikes(op, after):
                context.event_occurred()
                kept = next((part for optimizer in made for part in _owned_parts(optimizer, name)), None)
                if kept is not None:
                    _flip_kept(kept, context)

        moment(after=False)
        with _noted(made) if op.kind == "build" else nullcontext():
            act()
        moment(after=True)

    return around


@contextmanager
def _noted(made: list[Any]) -> Iterator[None]:
    """Note the optimizers that a build makes, in place of those of the build before."""
    from unittest import mock

    from torch.optim import Optimizer

    made.clear()
    init = Optimizer.__init__

    def noted(optimizer: Any, *given: Any, **named: Any) -> None:
        made.append(optimizer)
        init(optimizer, *given, **named)

    with mock.patch.object(Optimizer, "__init__", noted):
        yield


def _flip_kept(kept: Any, context: RankContext) -> None:
    import torch

    with torch._C.DisableTorchFunction(), torch.no_grad():
        if isinstance(kept, dict):
            kept["step"] ^= _BIT
        else:
            flip(kept)
    context.struck()


def flip(tensor: Any) -> None:
    """Flip one bit of a tensor's first element, in place."""
    import torch

    element = tensor.detach().view(-1)[:1].view(torch.uint8)
    element[-2 if element.numel() > 1 else 0].bitwise_xor_(_BIT)


def _owned_parts(optimizer: Any, name: str) -> Iterator[Any]:
    """The parts with elements, of each parameter or of its state, that this rank keeps; of steps that a whole group
    counts as a number, the group."""
    for group in optimizer.param_groups:
        if name == "step" and isinstance(group.get(name), int):
            yield group
        for param in group["params"]:
            yield from _local(param if name == "param" else optimizer.state.get(param, {}).get(name))


def _local(tensor: Any) -> Iterator[Any]:
    local = getattr(tensor, "_local_tensor", tensor)
    if local is not None and not isinstance(local, int | float) and local.numel():
        yield local
