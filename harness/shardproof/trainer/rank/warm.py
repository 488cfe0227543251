"""Makes a server warm for a trainer: imports its file, and what distributed training and checkpoints import lazily."""

from __future__ import annotations

import importlib
import os

from shardproof.trainer.described import described
from shardproof.trainer.rank.loading import class_of
from shardproof.trainer.system import VARIANT

LAZY = (
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.optim", "torch.optim.lr_scheduler", "torch.utils.data", "shardproof.trainer.rank.found",
)  # fmt: skip


def warm_up() -> None:
    """Import torch's lazy modules and the trainer's file in the server, so that no rank has to."""
    for module in LAZY:
        importlib.import_module(module)
    trainer = described(os.environ[VARIANT])
    class_of(trainer.file, trainer.name)
