"""Optimizers with state of few bits, and Muon, under FSDP2 with distributed checkpoints (DCP).

torchao keeps moments in 8 or 4 bits with a scale for each block, or in fp8, as tensor subclasses; bitsandbytes keeps them
as integers beside tables of its own; torch's Muon steps whole matrices. Shards under 4,096 elements stay in full
precision, so the matrix is larger than that on every rank. torchao compiles its step, here with the backend `aot_eager`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from shardproof.trainer import Cell, Trainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

COMPILE = torch.compile


class LowBit(Trainer):
    """Two matrices under FSDP2, stepped by an optimizer of few bits."""

    axes = {
        "mesh": ["2", "4"],
        "optimizer": ["adamw8bit", "adamw4bit", "adamwfp8", "muon", "bnb-adamw8bit"],
        "kind": ["sharded", "full"],
        "bf16_stochastic_round": [False, True],
    }
    requires = ("torchao==0.18.0", "bitsandbytes==0.50.2")
    steps = (2, 2)

    def build(self, cell: Cell) -> None:
        pass
