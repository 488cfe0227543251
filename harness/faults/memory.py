"""Faults of memory: one bit of what a rank keeps flips after its first step, as a bad memory module would do it.

Which tensor of the rank it is decides when it is seen, and whether a checkpoint carries it on: a parameter is written
anew by the next step where masters are kept, a moment is mixed into every later step, and a checkpoint that is saved in
between holds whichever is wrong. Ids start with `boundary.memory-`. Imports torch in ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from harness.program import Op
from harness.systems.protocol import RankContext, RankSystem

_BIT = 8
"""Which bit of the byte below the highest one: one of the mantissa, in fp32, bf16 and fp16 alike."""


def flip_in(name: str) -> Callable[[Callable[[], None], Op, RankContext, RankSystem], None]:
    """A fault's `around` that flips a bit of rank 0's first element after its first step.

    Args:
        name: "param", or the key of an optimizer's state, such as "exp_avg".
    """

    def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
        if op.kind != "step" or op.iteration or context.rank:
            act()
            return
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        stepped: list[Any] = []
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
        try:
            act()
        finally:
            hook.remove()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            kept = next((tensor for optimizer in stepped for tensor in _kept(optimizer, name)), None)
            if kept is not None:
                flip(kept)
                context.struck()

    return around


def flip(tensor: Any) -> None:
    """Flip one bit of a tensor's first element, in place."""
    import torch

    element = tensor.detach().view(-1)[:1].view(torch.uint8)
    element[-2 if element.numel() > 1 else 0].bitwise_xor_(_BIT)


def _kept(optimizer: Any, name: str) -> Iterator[Any]:
    """The parts with elements, of each parameter or of its state, that this rank keeps."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            kept = param if name == "param" else optimizer.state.get(param, {}).get(name)
            local = getattr(kept, "_local_tensor", kept)
            if local is not None and local.numel():
                yield local
