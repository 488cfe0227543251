"""torch alone: a local state dict of FSDP1 under HYBRID_SHARD.

python fsdp1-local-hybrid.py    # four gloo ranks on a CPU, ten seconds
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType


def main(rank: int, folder: str, wrong: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    model = FullyShardedDataParallel(
        torch.nn.Linear(4, 4),
        process_group=(mesh.get_group(1), mesh.get_group(0)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    try:
        model.state_dict()
        print(f"rank {rank}: made", flush=True)
    except ValueError as error:
        if "does not exist in input process group" not in str(error):
            raise
        wrong.value = 1
        print(f"rank {rank}: {error}", flush=True)


if __name__ == "__main__":
    wrong = torch.multiprocessing.get_context("spawn").Value("i", 0)
    torch.multiprocessing.spawn(main, (tempfile.mkdtemp(), wrong), nprocs=4)
    sys.exit(wrong.value > 0)
