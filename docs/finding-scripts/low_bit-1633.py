"""bitsandbytes alone: AdamW8bit on a model under FSDP2.

pip install bitsandbytes==0.50.2
python low_bit-1633.py    # two gloo ranks on a CPU, twenty seconds
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(rank: int, folder: str, wrong: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.Linear(128, 128)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.01)
    model(torch.ones(1, 128)).square().sum().backward()
    try:
        optimizer.step()
        print(f"rank {rank}: stepped", flush=True)
    except RuntimeError as error:
        if "got mixed torch.Tensor and DTensor" not in str(error):
            raise
        wrong.value = 1
        print(f"rank {rank}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    wrong = torch.multiprocessing.get_context("spawn").Value("i", 0)
    torch.multiprocessing.spawn(main, (tempfile.mkdtemp(), wrong), nprocs=2)
    sys.exit(wrong.value)
