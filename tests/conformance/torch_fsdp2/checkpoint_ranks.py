"""Real ranks for test_written_on_real_ranks: each runs FSDP2 scenarios up to their save."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ["ATEN_CPU_CAPABILITY"] = "default"

import torch
import torch.distributed as dist
from shardproof.program import expand
from shardproof.scenario import Scenario
from shardproof.systems.torch_fsdp2.rank import Rank
from shardproof.torch_loop.loop import context_of


def main(rank: int, folder: Path, scenarios: Sequence[Scenario]) -> None:
    """One rank; scenario number i uses `folder / str(i)`."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    world = scenarios[0].mesh.world
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    try:
        for number, scenario in enumerate(scenarios):
            system = Rank(replace(context_of(scenario, folder / str(number)), rank=rank))
            for op in expand(scenario):
                getattr(system, op.kind)(op)
    finally:
        dist.destroy_process_group()
