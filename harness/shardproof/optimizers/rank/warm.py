"""Makes a server warm for the runs of `shardproof optimizer`: FSDP2 and checkpoints once, and the optimizer's module.

A module that does not import is left for `trial`, which says so to whoever asked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardproof.optimizers.arms import SAVED, STEPS, Arm
from shardproof.optimizers.models import FEW_ROWS
from shardproof.optimizers.rank.sharded import Sharded
from shardproof.optimizers.request import VARIABLE
from shardproof.optimizers.system import NAME
from shardproof.scenario import Mesh, Scenario
from shardproof.torch_loop.loop import context_of, rehearse

REHEARSAL_MESH = "1x16x1"  # larger than any world of ranks, so that no entry that it leaves in a cache fits one


def warm_up() -> None:
    """Run a small arm in this process, and import the modules of `VARIABLE`."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        _rehearse(SAVED, str(Mesh()), Path(folder))
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
        _rehearse(STEPS, REHEARSAL_MESH, Path(folder))
        dist.destroy_process_group()
    for module in filter(None, os.environ.get(VARIABLE, "").split(",")):
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def _rehearse(program: str, mesh: str, folder: Path) -> None:
    scenario = Scenario.from_axes({"system": NAME, "model": FEW_ROWS, "program": program, "mesh": mesh})
    rehearse(Sharded(context_of(scenario, folder), Arm("torch.optim.AdamW", (), mesh)), scenario)
