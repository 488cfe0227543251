"""torch alone: what `load_sharded_optimizer_state_dict` gives an optimizer under HYBRID_SHARD.

python fsdp1-hybrid-moments.py    # four gloo ranks on a CPU, ten seconds
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
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType


def made(mesh: DeviceMesh) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """A model that two pairs of ranks shard, and its optimizer."""
    model = FullyShardedDataParallel(
        torch.nn.Linear(8, 8, bias=False),
        process_group=(mesh.get_group(1), mesh.get_group(0)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, torch.optim.AdamW(model.parameters())


def moments(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """This rank's part of the first moments."""
    found: torch.Tensor = next(iter(optimizer.state.values()))["exp_avg"]
    return found


def main(rank: int, folder: str, wrong: Any) -> None:
    """Save and load on one rank, and count what is wrong."""
    """Save and load on one rank, and count what is wrong."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    model, optimizer = made(mesh)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    saved = moments(optimizer).clone()
    kept = {"model": model.state_dict(), "optimizer": model.optim_state_dict(model, optimizer)}
    dcp.save(kept, checkpoint_id=folder)

    model, optimizer = made(mesh)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    read = load_sharded_optimizer_state_dict(state["model"], "optimizer", dcp.FileSystemReader(folder))
    optimizer.load_state_dict(model.optim_state_dict_to_load(model, optimizer, read["optimizer"]))
    bad, zero = int((moments(optimizer) != saved).sum()), int((moments(optimizer) == 0).sum())
    wrong.value = max(wrong.value, bad)
    print(f"rank {rank}: of {saved.numel()} moments {bad} are wrong, and {zero} are zero", flush=True)


if __name__ == "__main__":
    wrong = torch.multiprocessing.get_context("spawn").Value("i", 0)
    torch.multiprocessing.spawn(main, (tempfile.mkdtemp(), wrong), nprocs=4)
    sys.exit(wrong.value > 0)
