"""A plugin for servers: a process in which torch says that there are two GPUs, though it computes on the CPU.

Enough for what happens before a library runs: the rank takes its device, joins its group and says where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from shardproof.emulation import cuda
from shardproof.emulation.generator import DeviceGenerator
from shardproof.observe import ambient
from shardproof.observe.record import Record, whole
from shardproof.oracle.contract import Contract
from shardproof.program import Op
from shardproof.protocol.accepts import Accepts, Anything, Only, Operations
from shardproof.protocol.registry import register
from shardproof.protocol.system import RankContext, System

taken: list[int] = []
_open = ExitStack()


ACCEPTS = Accepts("gpu-stub", device=Only("cpu", "cuda"), mesh=Anything(), program=Operations(("build",)))
CONTRACT = Contract()
register(
    System(
        "gpu-stub", "says which device it got", __name__,
        accepts_entry=":ACCEPTS", contract_entry=":CONTRACT", stored_entry="", rank=":GpuRank",
    )
)  # fmt: skip


class GpuRank:
    """Its one operation sums 1 over the ranks, so that the group is seen to work."""

    def __init__(self, context: RankContext) -> None:
        self.rank = context.rank

    def build(self, op: Op) -> None:
        self.total = torch.ones(())
        torch.distributed.all_reduce(self.total)

    def observe(self, op: Op) -> Iterable[Record]:
        text = f"{taken} {int(self.total)} {torch.distributed.get_backend()}".encode()
        yield whole(op.index, self.rank, "extra_state", "seat", "utf8", (len(text),), text)


def pretend() -> None:
    """Called by servers as a warm-up. What the server's rehearsal makes on a GPU is made on the CPU."""
    ones = torch.ones
    torch.ones = lambda *size, device=None, **named: ones(*size, **named)  # type: ignore[assignment]
    torch.cuda.init = lambda: None
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_name = lambda index: "Stub GPU"  # type: ignore[misc]
    torch.cuda.set_device = taken.append  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda: torch.arange(16, dtype=torch.uint8)  # type: ignore[misc]


def emulate() -> None:
    """Called by servers as a warm-up: the emulated device stays on, in every process forked from here."""
    _open.enter_context(cuda.emulated())
    torch.cuda.init = lambda: None
    torch.cuda.get_device_name = lambda index: "emulated GPU"  # type: ignore[misc]
    ambient.seeded_gpu_state = lambda seed: DeviceGenerator().manual_seed(seed).get_state()
