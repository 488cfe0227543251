"""An emulated CUDA device for code that only runs on one: two memories, one device, `torch.cuda` answering.

`with emulated():` makes this thread, and threads started inside it, see cuda:0. Every tensor then lies on one side,
host or device, and operations refuse to mix them as CUDA does; so a library that forgets to copy is caught. Values are
computed by torch's CPU kernels in IEEE arithmetic. Code under test is not patched. Symbols of torch are, and come back
on exit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardproof.emulation import functions, machine, memory, symbols
from shardproof.emulation.machine import Kind
from shardproof.emulation.memory import Side
from shardproof.emulation.used_symbols import touch
from shardproof.ownership import hand_on

_MISSING: Any = object()


class _Process:
    """What is replaced in this process, and how many `emulated()` are open in all threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.originals: list[tuple[Any, str, Any]] = []

    def enter(self, devices: int, kind: Kind) -> None:
        with self.lock:
            self.depth += 1
            if self.depth > 1:
                return
            machine.set_up(devices, kind)
            for owner, name, stand_in in _replacements():
                self.originals.append((owner, name, owner.__dict__.get(name, _MISSING)))
                setattr(owner, name, stand_in)

    def leave(self) -> None:
        with self.lock:
            self.depth -= 1
            while self.depth == 0 and self.originals:
                owner, name, original = self.originals.pop()
                if original is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


class _Thread(threading.local):
    depth = 0


_process = _Process()
_thread = _Thread()
_start = threading.Thread.start
_make_hooks = saved_tensors_hooks.__init__
_engine_run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _start_emulated(self: threading.Thread) -> None:
    """Stands for `Thread.start`: threads of code under test are emulated for as long as they live, also after the
    block has ended."""
    run = self.run

    def run_emulated() -> None:
        with _mode():
            run()

    if _thread.depth:
        self.run = run_emulated  # type: ignore[method-assign]
    _start(self)


def _run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for the backward pass. It runs other people's Python (hooks, autograd functions) inside one intercepted
    function, which have to see the device again."""
    if _thread.depth == 0:
        return hand_on(_engine_run_backward, roots, *args, **kwargs)
    with memory.backward_of(roots):
        if functions.in_force():
            return hand_on(_engine_run_backward, roots, *args, **kwargs)
        with functions.TwoMemories():
            return hand_on(_engine_run_backward, roots, *args, **kwargs)


def _make_hooks_emulated(
    self: saved_tensors_hooks, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> None:
    """Stands for the constructor of hooks on what autograd saves, as activation checkpointing and offloading have them.
    Autograd calls them in the middle of an intercepted function, and they have to see the device there."""

    def pack_emulated(tensor: torch.Tensor) -> Any:
        functions.settle(tensor)
        return _seeing_the_device(pack, tensor)

    _make_hooks(self, pack_emulated, lambda packed: _seeing_the_device(unpack, packed))


def _seeing_the_device(hook: Callable[[Any], Any], value: Any) -> Any:
    if _thread.depth == 0 or functions.in_force():
        return hook(value)
    with functions.TwoMemories():
        return hook(value)


def _replacements() -> list[tuple[Any, str, Any]]:
    return [
        *symbols.replacements(),
        (threading.Thread, "start", _start_emulated),
        (torch.autograd, "_engine_run_backward", _run_backward),
        (saved_tensors_hooks, "__init__", _make_hooks_emulated),
    ]


@contextmanager
def _mode() -> Iterator[None]:
    """Two memories for this thread, once."""
    if _thread.depth:
        yield
        return
    _thread.depth += 1
    try:
        with functions.TwoMemories():
            yield
    finally:
        _thread.depth -= 1


@contextmanager
def emulated(devices: int = 1, kind: Kind = Kind()) -> Iterator[None]:  # noqa: B008  (frozen)
    """Emulate the device for this thread until the end of the block. May be nested.

    devices, kind: how many the machine has, and what each says of itself, for the outermost block. A process uses one
    of them, cuda:0 until it chooses another by `torch.cuda.set_device`.

    Threads that are started inside see the device too. Threads that ran before share `torch.cuda`'s answers, but what
    they make lies on no side. A child that is forked inside is inside; a spawned one is not.
    """
    _process.enter(devices, kind)
    try:
        with _mode():
            yield
    finally:
        _process.leave()


def is_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives on the device; answers outside the emulation as well."""
    return memory.resolve(tensor) is Side.DEVICE


def _tag_location(storage: Any) -> str | None:
    return f"cuda:{machine.current}" if _process.depth and memory.storage_side(storage) is Side.DEVICE else None


def _restore_location(storage: Any, location: str) -> Any:
    if not _process.depth or not location.startswith("cuda"):
        return None
    functions.device_side(location)
    touch("torch.load(cuda)")
    memory.put_storage(storage, Side.DEVICE)
    return storage


def _after_fork() -> None:
    _process.lock = threading.Lock()


# Files say on which device a tensor was, and `torch.load` puts it back there. The number puts these functions before
# torch's own for the CPU, which have 10.
torch.serialization.register_package(5, _tag_location, _restore_location)
os.register_at_fork(after_in_child=_after_fork)
