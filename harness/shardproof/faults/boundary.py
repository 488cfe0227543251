"""Boundary faults: something outside the library goes wrong on one rank. For any system that runs real ranks.

They show what the harness makes of a lost operation, a broken checkpoint, a corrupted tensor, a dead rank and a stuck
one, and, with a library that promises to survive such a thing, whether it does. Ids start with `boundary.`. Imports
torch in ranks only.

A fault says when it strikes, `context.struck()`. A scenario whose fault never did so says nothing about anybody, even
if it comes to the verdict that it must: a collective may never be made, or a parameter have no such state.
"""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardproof.errors import UsageError
from shardproof.faults import collectives, memory, overlap, ranks, reorder
from shardproof.faults.ranks import Around
from shardproof.program import Op
from shardproof.protocol.system import RankContext, RankSystem, event_note, strike_note
from shardproof.scenario import Scenario

Perform = Callable[[], None]

_POLL_S = 0.0005


@dataclass(frozen=True)
class BoundaryFault:
    """One fault. around: performs an operation on one rank, with the fault in it; it is given what performs the
    operation, the operation, what the rank knows, and the system on that rank; it calls `context.struck()` when it
    strikes. verdict: what every scenario must come to that a system names for it in its `conformance.toml`
    (`shardproof.faults.plain_scenario`). at: of a fault that strikes one of many events, what gives its `around` for
    the event's number, from 1; `ID@3` is such a fault at the third. The id alone is at the first. apart: or, with this,
    at none of them, but in the first step."""

    id: str
    doc: str
    verdict: str
    around: Around = field(repr=False)
    at: Callable[[int], Around] | None = field(default=None, repr=False)
    apart: bool = False


@lru_cache(maxsize=1024)
def boundary_fault(fault_id: str) -> BoundaryFault:
    """The fault of an id, which may name the event that it strikes. The same object for the same id, so that a fault
    can remember one operation in another one.

    Raises:
        UsageError: there is none of that id, or it strikes no numbered events.
    """
    name, mark, number = fault_id.partition("@")
    fault = BOUNDARY.get(name)
    if fault is None:
        raise UsageError.of("fault", fault_id, BOUNDARY, "boundary.kill-rank")
    if not mark:
        return fault
    if fault.at is None or not number.isdecimal() or number.startswith("0"):
        able = [each.id for each in BOUNDARY.values() if each.at]
        raise UsageError.of("fault", fault_id, f"@N, from 1, behind {', '.join(able)}", f"{able[0]}@2")
    return replace(fault, id=fault_id, around=fault.at(int(number)), at=None)


def perform(system: RankSystem, op: Op, context: RankContext) -> None:
    """Perform an operation, with the scenario's boundary faults around it."""
    act: Perform = lambda: getattr(system, op.kind)(op)  # noqa: E731
    for fault_id in context.scenario.faults:
        if not fault_id.startswith("boundary."):  # a system of a plugin may have faults of its own
            continue
        act = _wrapped(boundary_fault(fault_id), act, op, context, system)
    act()


def _wrapped(fault: BoundaryFault, act: Perform, op: Op, context: RankContext, system: RankSystem) -> Perform:
    return lambda: fault.around(act, op, replace(context, fault=fault.id), system)


def never_struck(scenario: Scenario, directory: Path) -> bool:
    """Whether a boundary fault of a scenario that ran in this folder found nothing to strike."""
    return any(not strike_note(directory, fault).exists() for fault in _planted(scenario))


def all_came(scenario: Scenario, directory: Path) -> bool:
    """Whether the event came of each boundary fault that never struck: it had nothing in it to strike, and a later one
    may have."""
    never = (fault for fault in _planted(scenario) if not strike_note(directory, fault).exists())
    return all(event_note(directory, fault).exists() for fault in never)


def _planted(scenario: Scenario) -> list[str]:
    return [fault for fault in scenario.faults if fault.startswith("boundary.")]


def _skip_load(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    if not op.kind.startswith("load"):
        act()
    else:
        context.struck()


def _flip_bit(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    """Flip one bit of the first tensor in the largest file, as a bad disk would."""
    act()
    if op.kind == "save" and context.rank == 0:
        file = _largest(context.checkpoint_path(op))
        data = bytearray(file.read_bytes())
        data[_first_element(data)] ^= 1
        file.write_bytes(data)
        context.struck()


def _first_element(data: bytearray) -> int:
    """Where the elements of the first tensor lie: behind the head of an entry of torch's archive, whose lengths of name
    and padding stand 4 bytes before the name. In a file of another kind, the middle."""
    at = data.find(b"/data/0")
    head = data.rfind(b"PK\x03\x04", 0, max(at, 0))
    if head < 0:
        return len(data) // 2
    name, padding = struct.unpack_from("<HH", data, head + 26)
    return int(head + 30 + name + padding)


def _truncate(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    act()
    if op.kind == "save" and context.rank == 0:
        file = _largest(context.checkpoint_path(op))
        os.truncate(file, file.stat().st_size // 2)
        context.struck()


def _largest(folder: Path) -> Path:
    files = (f for f in folder.rglob("*") if f.is_file() and not f.name.startswith("."))
    return max(files, key=lambda f: f.stat().st_size)


def _struck(op: Op, context: RankContext) -> bool:
    """Whether this is the place where most faults strike: rank 0's first step."""
    return op.kind == "step" and op.iteration == 0 and context.rank == 0


def _kill_in_save(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    """Let the rank die as soon as the first byte of the checkpoint is on disk, with all processes that the library
    has started."""
    if op.kind != "save" or context.rank:
        act()
        return
    folder = context.checkpoint_path(op)

    def watch() -> None:
        while not any(f.is_file() and f.stat().st_size for f in folder.rglob("*")):
            time.sleep(_POLL_S)
        context.struck()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    act()
    time.sleep(3600)  # the save was over before the watch saw a byte of it: wait until it does


def _has_storage(tensor: Any) -> bool:
    """Whether its memory is there: Megatron-FSDP frees that of a parameter after its forward pass."""
    return bool(tensor.untyped_storage().size())


def _corrupt_parameter(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    """Change one element of a parameter's local shard between the forward and the backward pass."""
    if not _struck(op, context):
        act()
        return
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(module: Any, *_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            shards = [p._local_tensor for p in module.parameters() if hasattr(p, "_local_tensor")]
            for shard in (t for t in (*shards, *module.parameters()) if t.numel() and _has_storage(t)):
                _change_element(shard.data)
                context.struck()
                return

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    act()
    for hook in hooks:
        hook.remove()


def _change_element(tensor: Any) -> None:
    import torch

    with torch._C.DisableTorchFunction():
        tensor.view(-1)[:1].add_(1.0)


def _lose_contribution(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    """Lose what the rank sends into the reductions of the step: zeros arrive in its place."""
    if not _struck(op, context):
        act()
        return
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Lossy(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunction():  # below the emulated device, which would refuse tensors of two sides
                if func.namespace == "c10d" and "reduce" in func.__name__:
                    for sent in tree_leaves(args):
                        if isinstance(sent, torch.Tensor):
                            sent.zero_()
                            context.struck()
                return func(*args, **(kwargs or {}))

    with Lossy():  # type: ignore[no-untyped-call]
        act()


def _corrupt_gradient(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    """Change one element of a reduced gradient on its way to the optimizer: after the backward pass, or, where the
    library puts it into the optimizer's hands only later, right before the optimizer reads it."""
    if not _struck(op, context):
        act()
        return
    changed = False

    def change(optimizer: Any) -> None:
        nonlocal changed
        for gradient in memory.gradients_of(optimizer):
            if not changed:
                _change_element(gradient)
                context.struck()
                changed = True

    with between(system, lambda _: change(system.state.optimizer)), memory.at_optimizer(change):  # type: ignore[attr-defined]
        act()


@contextmanager
def between(system: RankSystem, happens: Callable[[Op], None]) -> Iterator[None]:
    """Have something happen after the backward passes of a step, when gradients are reduced and not yet clipped.

    Raises:
        AttributeError: the system's loop has no such seam, `between`.
    """
    before = system.between  # type: ignore[attr-defined]
    system.between = happens  # type: ignore[attr-defined]
    try:
        yield
    finally:
        system.between = before  # type: ignore[attr-defined]


def _drop_replica_state(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    """Let the second replica's optimizer forget its state at the end of the first step."""
    of_first = context.rank < context.mesh.world // context.mesh.dp_replicate
    if of_first or op.kind != "step" or op.iteration:
        act()
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def forget(optimizer: Any, *_: Any) -> None:
        if optimizer.state:
            context.struck()
        optimizer.state.clear()

    hook = register_optimizer_step_post_hook(forget)
    act()
    hook.remove()


def _numbered(fault_id: str, doc: str, verdict: str, at: Callable[[int], Around]) -> BoundaryFault:
    """A fault that strikes the first of many events, or another one of them."""
    return BoundaryFault(fault_id, doc, verdict, at(1), at)


BOUNDARY: dict[str, BoundaryFault] = {
    fault.id: fault
    for fault in (
        BoundaryFault("boundary.skip-load", "a load is never called", "mismatch", _skip_load),
        BoundaryFault("boundary.flip-bit", "one bit of a written tensor flips on disk", "mismatch", _flip_bit),
        BoundaryFault("boundary.truncate", "a checkpoint file loses its second half", "crash", _truncate),
        BoundaryFault(
            "boundary.corrupt-parameter", "a parameter changes between forward and backward on rank 0", "mismatch",
            _corrupt_parameter,
        ),
        BoundaryFault(
            "boundary.lost-contribution", "rank 0 takes part in the reductions of its first step with zeros",
            "mismatch", _lose_contribution,
        ),
        BoundaryFault(
            "boundary.corrupt-gradient", "a gradient changes between backward and step on rank 0", "mismatch",
            _corrupt_gradient,
        ),
        BoundaryFault(
            "boundary.replica-state", "the second replica loses its optimizer state after the first step", "mismatch",
            _drop_replica_state,
        ),
        BoundaryFault(
            "boundary.kill-rank", "rank 0 is killed in its first step; numbered, each rank before each operation",
            "crash", ranks.in_first_step(ranks.killed), ranks.before_operation(ranks.killed), apart=True,
        ),
        BoundaryFault(
            "boundary.kill-in-save", "rank 0 is killed while it writes a checkpoint", "crash", _kill_in_save
        ),
        BoundaryFault(
            "boundary.stuck-rank", "rank 0 is stopped in its first step; numbered, each rank before each operation",
            "hang", ranks.in_first_step(ranks.stopped), ranks.before_operation(ranks.stopped), apart=True,
        ),
        BoundaryFault(
            "boundary.error-rank", "rank 0 raises in its first step; numbered, each rank before each operation",
            "crash", ranks.in_first_step(ranks.failed), ranks.before_operation(ranks.failed), apart=True,
        ),
        _numbered(
            "boundary.kill-at-file", "a rank is killed where it opens or changes a file of a save or a load", "crash",
            ranks.at_file(ranks.killed),
        ),
        _numbered("boundary.stuck-at-file", "a rank is stopped there", "hang", ranks.at_file(ranks.stopped)),
        _numbered("boundary.error-at-file", "a rank is given an error there", "crash", ranks.at_file(ranks.failed)),
        *(
            BoundaryFault(
                f"boundary.memory-{name}", f"a bit of rank 0's {what} flips after its first step; numbered, before or "
                "after each operation", "mismatch", memory.flip_in(key), memory.flip_at(key), apart=True,
            )
            for name, what, key in (
                ("param", "parameters", "param"), ("moment", "first moments", "exp_avg"),
                ("step", "step counter", "step"),
            )
        ),
        _numbered(
            memory.GRADIENT, "a bit of rank 0's gradients flips right before its first step", "mismatch",
            memory.flip_gradient,
        ),
        BoundaryFault(
            "boundary.stray-key", "a key that no optimizer knows stands in rank 0's param groups after its first step",
            "mismatch", memory.stray_key(),
        ),
        _numbered(
            "boundary.collective-late", "rank 0 is half a second late at its first collective", "pass",
            collectives.at_collective(collectives.late),
        ),
        _numbered(
            "boundary.collective-error", "rank 0's first collective raises there", "crash",
            collectives.at_collective(collectives.broken),
        ),
        _numbered(
            "boundary.collective-flip", "a bit of what rank 0 receives in its first collective is wrong", "mismatch",
            collectives.at_collective(collectives.flipped),
        ),
        _numbered(
            "boundary.collective-swap", "rank 0 receives two ranks' parts of its first collective the wrong way round",
            "mismatch", collectives.at_collective(collectives.swapped),
        ),
        _numbered(
            "boundary.collective-drop", "rank 0 never makes its first collective, and goes on", "crash",
            collectives.at_collective(collectives.dropped),
        ),
        _numbered(
            "boundary.collective-lost", "no rank makes its first collective, and all go on", "mismatch",
            collectives.at_collective(collectives.dropped, everywhere=True),
        ),
        BoundaryFault(
            "boundary.collective-narrow", "every sum of fp32 values over ranks is rounded to bf16", "mismatch",
            collectives.narrow_sums,
        ),
        _numbered(
            "boundary.collective-reorder", "two collectives that are under way at once end in the other order", "pass",
            reorder.exchanged,
        ),
        _numbered(
            "boundary.async-late", "an asynchronous save is held at its first read until the next step is over", "pass",
            overlap.late_read,
        ),
        _numbered(
            "boundary.async-live", "the same, of torch's asynchronous save without the copy that it makes", "mismatch",
            overlap.late_read_of_live,
        ),
    )
}  # fmt: skip
