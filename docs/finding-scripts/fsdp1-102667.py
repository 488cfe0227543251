"""torch alone: a local state dict of FSDP1 with use_orig_params, loaded into the model that it comes from.

python fsdp1-102667.py    # two gloo ranks on a CPU, ten seconds
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def main(rank: int, folder: str, wrong: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for original in (False, True):
        model = FullyShardedDataParallel(
            torch.nn.Linear(4, 4), use_orig_params=original, device_id=torch.device("cpu")
        )
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
        try:
            model.load_state_dict(model.state_dict())
            print(f"rank {rank}, use_orig_params={original}: loaded", flush=True)
        except RuntimeError as error:
            if not original or "_flat_param" not in str(error):
                raise
            wrong.value = 1
            print(f"rank {rank}, use_orig_params={original}: {error}", flush=True)


if __name__ == "__main__":
    wrong = torch.multiprocessing.get_context("spawn").Value("i", 0)
    torch.multiprocessing.spawn(main, (tempfile.mkdtemp(), wrong), nprocs=2)
    sys.exit(wrong.value > 0)
