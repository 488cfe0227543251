"""Faults of collectives: the first collective that rank 0 makes in its first step goes wrong, below the library.

The call is struck where torch dispatches it, so that any library over torch.distributed is struck alike: it is late, it
raises, or what the rank receives is not what was sent. Ids start with `boundary.collective-`. Imports torch in ranks
only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from harness.faults.memory import flip
from harness.program import Op
from harness.systems.protocol import RankContext, RankSystem

LATE_S = 0.5
_NAMESPACES = ("c10d", "_c10d_functional")
_NOT_MEANT = ("wait", "barrier", "send", "recv")

Call = Callable[[], Any]
"""Makes the collective, and gives what torch's operator gives."""


def first_collective(
    strike: Callable[[Call, Any, int], Any],
) -> Callable[[Callable[[], None], Op, RankContext, RankSystem], None]:
    """A fault's `around`. strike: is given the call, its arguments and the number of ranks; gives what the call gives
    in its place."""

    def around(act: Callable[[], None], op: Op, context: RankContext, system: RankSystem) -> None:
        if op.kind != "step" or op.iteration or context.rank:
            act()
            return
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Struck(TorchDispatchMode):  # type: ignore[no-untyped-call]
            struck = False

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                with torch._C.DisableTorchFunction():  # below the emulated device, which would refuse two sides
                    call: Call = lambda: func(*args, **(kwargs or {}))  # noqa: E731
                    meant = func.namespace in _NAMESPACES and not any(name in func.__name__ for name in _NOT_MEANT)
                    if self.struck or not meant:
                        return call()
                    self.struck = True
                    return strike(call, args, context.mesh.world)

        with Struck():  # type: ignore[no-untyped-call]
            act()

    return around


def late(call: Call, args: Any, world: int) -> Any:
    """The rank comes to the collective half a second after the others."""
    time.sleep(LATE_S)
    return call()


def broken(call: Call, args: Any, world: int) -> Any:
    """The collective raises on this rank, which never takes part in it."""
    raise RuntimeError("the collective failed on this rank (boundary.collective-error)")


def flipped(call: Call, args: Any, world: int) -> Any:
    """One bit of what this rank receives is wrong."""
    made = _finished(call())
    flip(_received(made, args))
    return made


def swapped(call: Call, args: Any, world: int) -> Any:
    """What this rank receives of the first two ranks has changed places; of a reduction, two parts of the result."""
    import torch

    made = _finished(call())
    parts = _received(made, args).detach().view(-1).chunk(world)
    if len(parts) > 1 and parts[0].shape == parts[1].shape:
        first = parts[0].clone()
        with torch.no_grad():
            parts[0].copy_(parts[1])
            parts[1].copy_(first)
    return made


def _finished(made: Any) -> Any:
    """The same when the collective has ended, with a handle that has ended too: operators of c10d give their handle
    last, and gloo's writes the result of a reduce-scatter anew whenever somebody waits for it. Functional ones give the
    tensor itself."""
    import torch
    from torch._C._distributed_c10d import _create_work_from_future as _of_future  # type: ignore[attr-defined]
    from torch.distributed import Work

    if isinstance(made, torch.Tensor):
        return torch.ops._c10d_functional.wait_tensor(made)
    if not isinstance(made, tuple | list) or not made:
        return made
    *given, handle = made
    Work.unbox(handle).wait()
    ended: torch.futures.Future[Any] = torch.futures.Future()
    ended.set_result(None)
    return type(made)([*given, _of_future(ended).boxed()])


def _received(made: Any, args: Any) -> Any:
    """What the collective gives, or else writes to, which is the first tensor among its arguments."""
    import torch
    from torch.utils._pytree import tree_leaves

    given = [made] if isinstance(made, torch.Tensor) else tree_leaves(args)
    return next(leaf for leaf in given if isinstance(leaf, torch.Tensor) and leaf.numel())
