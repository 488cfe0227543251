"""torch alone: DistributedDataParallel with static_graph=True, whose first backward runs under no_sync.

python ddp_zero-143580.py    # two gloo ranks on a CPU, ten seconds
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(rank: int, folder: str, wrong: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for static_graph in (False, True):
        model = DistributedDataParallel(torch.nn.Linear(4, 4), static_graph=static_graph)
        try:
            with model.no_sync():
                model(torch.ones(1, 4)).sum().backward()
            model(torch.ones(1, 4)).sum().backward()
            print(f"rank {rank}, static_graph={static_graph}: accumulated", flush=True)
        except RuntimeError as error:
            if not static_graph or "expect_autograd_hooks_" not in str(error):
                raise
            wrong.value = 1
            print(f"rank {rank}, static_graph={static_graph}: {str(error)[:50]}", flush=True)
    dist.barrier()
    os._exit(0)  # to tear down what failed now and then aborts the process


if __name__ == "__main__":
    wrong = torch.multiprocessing.get_context("spawn").Value("i", 0)
    torch.multiprocessing.spawn(main, (tempfile.mkdtemp(), wrong), nprocs=2)
    sys.exit(wrong.value)
