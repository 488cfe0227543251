"""A system without a library, for tests of the world: what it does in its second operation is told by a fault.

The server imports this module as a plugin. `die`, `raise`, `hang` and so on strike rank 1 (or the only rank).
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from shardproof.observe.record import Record, whole
from shardproof.oracle.contract import Contract
from shardproof.program import Op
from shardproof.protocol.accepts import EVERY_STEP, Accepts, Anything, Operations
from shardproof.protocol.registry import register
from shardproof.protocol.system import RankContext, System

ACCEPTS = Accepts("stub", mesh=Anything(), program=Operations(EVERY_STEP), faults=Anything())
CONTRACT = Contract()
STUB = System(
    "stub", "does nothing", __name__,
    accepts_entry=":ACCEPTS", contract_entry=":CONTRACT", stored_entry="", rank=":StubRank",
)  # fmt: skip
register(STUB)
register(replace(STUB, name="missing", doc="cannot be imported", rank="no_such_module:Rank"))

warmed: list[str] = []
KEPT: list[int] = []


def warm_up() -> None:
    warmed.append("yes")


def broken_warm_up() -> None:
    raise RuntimeError("the library does not start")


def daemon() -> None:
    """A grandchild in its own session whose parent is gone, with the rank's descriptors open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()


def fork_bomb() -> None:
    for _ in range(5):
        daemon()
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def fill_disk() -> NoReturn:
    raise OSError(28, "No space left on device")


def use_up_descriptors() -> NoReturn:
    """Open files until this process may have no more, and keep them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    while True:
        KEPT.append(os.open(os.devnull, os.O_RDONLY))


def use_up_memory() -> NoReturn:
    """Take memory until this process may have no more."""
    bound = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    held = []
    while True:
        held.append(bytearray(16 << 20))


def allow_no_more_descriptors() -> None:
    """What is open stays open, and nothing else can be opened."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def allow_no_more_memory() -> None:
    """What is taken stays taken, and nothing else can be taken from the kernel."""
    bound = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def ask_the_store_late() -> None:
    """What a rank does that makes a group when the others have long made it."""
    from torch.distributed.distributed_c10d import _get_default_store

    time.sleep(0.5)
    _get_default_store().add("late", 1)


def group_signal() -> None:
    os.killpg(0, signal.SIGKILL)


ACTIONS: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(600),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(7),
    "exit0": lambda: os._exit(0),
    "system_exit": lambda: sys.exit("leaving"),
    "raise": lambda: {}["absent"],
    "long": lambda: (_ for _ in ()).throw(ValueError("x" * 1_000_000)),
    "daemon": daemon,
    "fork_bomb": fork_bomb,
    "disk": fill_disk,
    "killpg": group_signal,
    "descriptors": use_up_descriptors,
    "memory": use_up_memory,
    "no_descriptors": allow_no_more_descriptors,
    "no_memory": allow_no_more_memory,
}


class StubRank:
    def __init__(self, context: RankContext) -> None:
        self.context = context
        if "construct" in context.scenario.faults:
            raise ValueError("no such thing")

    def build(self, op: Op) -> None:
        print("building", self.context.rank, flush=True)
        if "late" in self.context.scenario.faults and op.index == 2 and self.context.rank:
            ask_the_store_late()

    def step(self, op: Op) -> None:
        import torch
        import torch.distributed as dist

        world = self.context.mesh.world
        if self.context.rank == min(1, world - 1):
            for fault in self.context.scenario.faults:
                ACTIONS.get(fault, lambda: None)()
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [world] * 3

    def observe(self, op: Op) -> Iterable[Record]:
        if "observe" in self.context.scenario.faults:
            raise RuntimeError("cannot look")
        data = bytes([op.index, self.context.rank])
        yield whole(op.index, self.context.rank, "param", "w", "uint8", (2,), data)


def echo(payload: bytes) -> bytes:
    return payload


def fail(payload: bytes) -> bytes:
    raise ValueError(payload.decode())


def act(payload: bytes) -> bytes:
    ACTIONS[payload.decode()]()
    return b"acted"


def environment(payload: bytes) -> bytes:
    import torch

    return f"{os.environ['ATEN_CPU_CAPABILITY']} {torch.get_num_threads()} {warmed} {sys.path[0]}".encode()


def variables(payload: bytes) -> bytes:
    return "\0".join(os.environ).encode()


def imported(payload: bytes) -> bytes:
    """Those of some modules, separated by spaces, that are imported here."""
    return " ".join(name for name in payload.decode().split() if name in sys.modules).encode()


def pid(payload: bytes) -> bytes:
    return str(os.getpid()).encode()


def sharding_cache(payload: bytes) -> bytes:
    from torch.distributed.tensor import DTensor

    return str(DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_info().currsize).encode()
