"""Faults of collectives: one collective in a rank's first step goes wrong below the library, for example with a flipped
bit.

The call is struck where torch dispatches it, so that any library over torch.distributed is struck alike: it is late, it
raises, it is never made, or what the rank receives is not what was sent. Which one it is says the number behind the
fault's id, from 1; without one it is the first. Ids start with `boundary.collective-`. Imports torch in ranks only.

*Does not strike*: sends and receives between two ranks, barriers, and collectives of C++ code, which are dispatched
where no Python sees them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardproof.faults.memory import flip
from shardproof.faults.ranks import Around
from shardproof.ownership import planted
from shardproof.program import Op
from shardproof.protocol.system import RankContext, RankSystem

LATE_S = 0.5
_NAMESPACES = ("c10d", "_c10d_functional")
_NOT_MEANT = ("wait", "barrier", "send", "recv")


@dataclass(frozen=True)
class Collective:
    """One call of a collective. func, args, kwargs: torch's operator and what it was given. world: how many ranks there
    are. struck: leaves a note that the fault strikes it."""

    func: Any
    args: Any
    kwargs: Any
    world: int
    struck: Callable[[], None]

    def make(self) -> Any:
        """Take part in it; gives what torch's operator gives."""
        return self.func(*self.args, **(self.kwargs or {}))


Meet = Callable[[Collective], Any]
"""Is shown each collective of a rank and gives what the operator gives, or something in its place."""


def meeting(meet: Meet, context: RankContext) -> Any:
    """A context manager in which `meet` takes the place of every collective that this thread makes."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Meeting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunction():  # below the emulated device, which would refuse two sides
                one = Collective(func, args, kwargs, context.mesh.world, context.struck)
                meant = func.namespace in _NAMESPACES and not any(name in func.__name__ for name in _NOT_MEANT)
                return meet(one) if meant else one.make()

    return Meeting()  # type: ignore[no-untyped-call]


def at_collective(strike: Meet, *, everywhere: bool = False) -> Callable[[int], Around]:
    """What gives a fault's `around` for the number of the collective that it strikes, of those in a rank's first step.

    Args:
        everywhere: on every rank, each at its own one of that number; else on rank 0.
    """

    def numbered(number: int) -> Around:
        def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
            if op.kind != "step" or op.iteration or (context.rank and not everywhere):
                act()
                return
            made = 0

            def meet(one: Collective) -> Any:
                nonlocal made
                made += 1
                if made != number:
                    return one.make()
                context.event_occurred()
                return strike(one)

            with meeting(meet, context):
                act()

        return around

    return numbered


def late(one: Collective) -> Any:
    """The rank comes to the collective half a second after the others."""
    one.struck()
    time.sleep(LATE_S)
    return one.make()


def broken(one: Collective) -> Any:
    """The collective raises on this rank, which never takes part in it."""
    one.struck()
    raise planted(RuntimeError("the collective failed on this rank (boundary.collective-error)"))


def flipped(one: Collective) -> Any:
    """Flips one bit of the tensor that this rank receives from a collective."""
    made = _finished(one.make())
    for received in _received(made, one.args):
        flip(received)
        one.struck()
    return made


def swapped(one: Collective) -> Any:
    """What this rank receives of the first two ranks has changed places; of a reduction, two parts of the result."""
    import torch

    made = _finished(one.make())
    parts = [part for received in _received(made, one.args) for part in received.detach().view(-1).chunk(one.world)]
    if len(parts) > 1 and parts[0].shape == parts[1].shape:
        first = parts[0].clone()
        with torch.no_grad():
            parts[0].copy_(parts[1])
            parts[1].copy_(first)
        one.struck()
    return made


def dropped(one: Collective) -> Any:
    """The collective is never made here, and says that it has ended: what it would have written is as it was, and what
    it would have given anew is zeros."""
    import torch
    import torch.distributed._functional_collectives  # which says what shape functional ones have
    from torch.utils._pytree import tree_map_only

    one.struck()
    if one.func.namespace != "c10d":
        if one.func.__name__.partition(".")[0].endswith("_"):
            return one.args[0]
        to_meta = lambda tensor: tensor.to("meta")  # noqa: E731
        shapes = one.func(*tree_map_only(torch.Tensor, to_meta, one.args), **(one.kwargs or {}))
        return tree_map_only(torch.Tensor, lambda tensor: torch.zeros_like(tensor, device="cpu"), shapes)
    alone = len(one.func._schema.returns) == 1  # the handle; else it comes behind what is written, the first argument
    return _ended() if alone else (one.args[0], _ended())


def narrow_sums(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
    """Rounds what every reduction of fp32 values gives in a rank's steps to bf16, as a library does that adds up in
    another dtype than it says. It shows whether the gradients of a scenario would tell."""
    import torch

    def meet(one: Collective) -> Any:
        made = one.make()
        if "reduce" not in one.func.__name__:
            return made
        made = _finished(made)
        for received in _received(made, one.args):
            rounded = received.detach().bfloat16().float()
            if received.dtype is torch.float32 and not torch.equal(rounded, received):
                with torch.no_grad():
                    received.copy_(rounded)
                one.struck()
        return made

    if op.kind != "step":
        act()
        return
    context.event_occurred()
    with meeting(meet, context):
        act()


def _finished(made: Any) -> Any:
    """The same when the collective has ended, with a handle that has ended too: operators of c10d give their handle
    last, and gloo's writes the result of a reduce-scatter anew whenever somebody waits for it. Functional ones give the
    tensor itself."""
    import torch
    from torch.distributed import Work

    if isinstance(made, torch.Tensor):
        return torch.ops._c10d_functional.wait_tensor(made)
    if not isinstance(made, tuple | list) or not made:
        return made
    *given, handle = made
    Work.unbox(handle).wait()
    return type(made)([*given, _ended()])


def _ended() -> Any:
    """A handle of a collective that has ended, as torch's operators give it."""
    import torch
    from torch._C._distributed_c10d import _create_work_from_future as _of_future  # type: ignore[attr-defined]

    ended: torch.futures.Future[Any] = torch.futures.Future()
    ended.set_result(None)
    return _of_future(ended).boxed()


def _received(made: Any, args: Any) -> list[Any]:
    """What the collective gives, or else writes to, which is the first tensor among its arguments; nothing where that
    has no elements."""
    import torch
    from torch.utils._pytree import tree_leaves

    given = [made] if isinstance(made, torch.Tensor) else tree_leaves(args)
    return [leaf for leaf in given if isinstance(leaf, torch.Tensor) and leaf.numel()][:1]
