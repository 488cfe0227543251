"""Makes a server warm for a trainer: imports its file, and what distributed training and checkpoints import lazily.

Nothing of the trainer's own runs here, only torch's FSDP2 and DCP on a model of shardproof's, the rehearsal of the
system that tests them. Without it a rank around FSDP2 spent half of its CPU, 0.35 of 0.65 s, on torch's lazy
imports.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardproof.entry import resolve
from shardproof.protocol.registry import all_systems
from shardproof.trainer.described import described
from shardproof.trainer.rank.emulated import class_for
from shardproof.trainer.system import VARIANT

LAZY = (
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.optim", "torch.optim.lr_scheduler", "torch.utils.data", "shardproof.trainer.rank.found",
)  # fmt: skip


def warm_up() -> None:
    """Import torch's lazy modules and the trainer's file in the server, so that no rank has to."""
    for module in LAZY:
        importlib.import_module(module)
    _rehearse()
    trainer = described(os.environ[VARIANT])
    with at_most(LONGEST_IMPORT_S, f"the import of {trainer.file.name}"):
        class_for(trainer, "cpu")  # a server whose ranks have GPUs is not warmed up


LONGEST_IMPORT_S = 300.0
"""Nobody else watches the import of a trainer's file, which may have an endless loop at its top."""


@contextmanager
def at_most(limit_s: float, what: str) -> Iterator[None]:
    """Raise a `TimeoutError` in this block, on the main thread, once it has lasted so many seconds."""

    def over(*_: object) -> None:
        raise TimeoutError(f"{what} has not ended after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _rehearse() -> None:
    """Have torch do once what ranks will do, as the systems rehearse that test torch itself. A torch that cannot, such
    as an old one that a trainer requires, costs time and nothing else."""
    try:
        for system in all_systems():
            if system.is_torch and not system.judge_entry:  # those with a judge of their own are trainers
                resolve(system.entry(system.warm_up))()
    except Exception:
        if dist.is_initialized():
            dist.destroy_process_group()
