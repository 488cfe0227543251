"""Forks the managers and workers that a library starts with `multiprocessing`'s spawn method, so that they inherit the
emulation.

dist_checkpointing starts a `multiprocessing` manager on every rank before it first writes. Spawned, each is a fresh
interpreter that imports torch again to unpickle what it is sent: two seconds of a core a rank and save, by far the
largest part of a tiny scenario. A fork of the rank has torch already, and stays in its process group.

A worker that is spawned is an ordinary torch process without an emulated device, and dies as soon as it calls
`torch.cuda.set_device`, as the persistent writer of asynchronous checkpoints does; whoever waits for it waits forever.
Under the plugin workers are forked, too, which leaves them on the emulated device.

*Does not exercise*: pickling of what a spawned process is started with, and its start in an empty interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, popen_fork
from multiprocessing.managers import BaseManager
from typing import Any

from shardproof.emulation.used_symbols import touch

REAL_SPAWN = "SHARDPROOF_REAL_SPAWN"
"""Environment variable: any text leaves spawned processes as they are."""


@contextmanager
def forked(*, workers: bool = False) -> Iterator[None]:
    """A context in which `multiprocessing`'s spawn method forks its manager processes from this one, so that they
    inherit the emulated device. With `workers`, ordinary worker processes are forked too; without, they are spawned as
    usual."""
    if os.environ.get(REAL_SPAWN):
        yield
        return
    spawn: Any = context.SpawnProcess
    spawned, manager = spawn._Popen, vars(BaseManager)["_run_server"].__func__

    def start(process: Any) -> object:
        is_manager = getattr(process._target, "__func__", None) is manager
        if not is_manager and not workers:
            return spawned(process)
        touch(f"multiprocessing spawn (of a {'manager' if is_manager else 'worker'})")
        return popen_fork.Popen(process)

    spawn._Popen = staticmethod(start)
    try:
        yield
    finally:
        spawn._Popen = staticmethod(spawned)
