"""torch alone: a checkpoint of FSDP1 that cannot be loaded, as two of four ranks have no part of a head of two labels.

python fsdp1-empty-shard.py    # four gloo ranks on a CPU, ten seconds
"""

from __future__ import annotations

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def main(rank: int, folder: str, wrong: Any) -> None:
    """Save and load on one rank, with eight labels and with two."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    for labels in (8, 2):
        model = FullyShardedDataParallel(torch.nn.Linear(8, labels), device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=f"{folder}/{labels}")
        try:
            dcp.load(states, checkpoint_id=f"{folder}/{labels}")
            outcome = "loaded"
        except CheckpointException as error:
            if "Missing key in checkpoint state_dict: optimizer.param_groups" not in str(error):
                raise
            wrong.value = 1
            outcome = str(error).strip().splitlines()[-1]
        print(f"rank {rank}, {labels} labels: {outcome}", flush=True)


if __name__ == "__main__":
    wrong = torch.multiprocessing.get_context("spawn").Value("i", 0)
    torch.multiprocessing.spawn(main, (tempfile.mkdtemp(), wrong), nprocs=4)
    sys.exit(wrong.value > 0)
