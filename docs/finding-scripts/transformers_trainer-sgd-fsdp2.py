"""torch 2.13, as Accelerate calls it: a full optimizer state dict of SGD without momentum cannot be loaded under FSDP2.

    pip install torch
    python transformers_trainer-sgd-fsdp2.py

Two ranks shard a layer, step, take the full state dict of the optimizer, and set it again. Plain SGD has no tensor in
its state, and `set_optimizer_state_dict` looks for one to learn the device. This is what the Trainer of Transformers
comes to with `fsdp`, FSDP2 and `optim="sgd"` when it is resumed. Ends with status 1 where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard


def run(rank: int, folder: str, wrong) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    kept = get_optimizer_state_dict(model, optimizer, options=options)
    try:
        set_optimizer_state_dict(model, optimizer, kept if rank == 0 else {}, options=options)
    except AssertionError as error:
        if "Expected device to be set" not in str(error):
            raise
        wrong.value = 1
        print(f"rank {rank}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, wrong), nprocs=2)
    sys.exit(wrong.value)
