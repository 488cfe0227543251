"""NeMo Automodel 0.7.0 cannot load the optimizer of a checkpoint that an earlier release has written.

    pip install torch "nemo-automodel==0.6.0"
    python automodel-multipliers.py save /tmp/run
    pip install "nemo-automodel==0.7.0"
    python automodel-multipliers.py load /tmp/run

One process. A model, AdamW and Automodel's own schedule, saved and loaded by its checkpointer as its recipes do it. Since
0.7.0 the schedule puts `lr_mult` and `wd_mult` into every param group when it is made, and the load asks for both keys,
which the checkpoint does not have: it raises `Missing key in checkpoint state_dict`. With 0.6.0 (or 0.7.0) at both ends
nothing is raised. Ends with status 1 where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

from importlib.metadata import version

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException


def main(what: str, folder: str) -> int:
    os.makedirs(folder, exist_ok=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=1e-4, max_lr=1e-3, min_lr=1e-5, lr_warmup_steps=0, lr_decay_steps=10,
        lr_decay_style="cosine", start_wd=0.01, end_wd=0.01, wd_incr_steps=10, wd_incr_style="constant",
    )
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    schedule.step(1)
    config = CheckpointingConfig(
        enabled=True, checkpoint_dir=folder, model_save_format="torch_save", model_cache_dir="", model_repo_id="",
        save_consolidated=False, is_peft=False,
    )
    keeper = Checkpointer(config, dp_rank=0, tp_rank=0, pp_rank=0)
    try:
        if what == "save":
            keeper.save_optimizer(optimizer, model, folder, [schedule])
        else:
            keeper.load_optimizer(optimizer, model, folder, [schedule])
    except CheckpointException as error:
        if "_mult" not in str(error):
            raise
        print(f"nemo-automodel {version('nemo-automodel')}: {type(error).__name__}: {error.failures[0][0]}")
        return 1
    print(f"nemo-automodel {version('nemo-automodel')}: {what} is done")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("save", "load"):
        print("python automodel-multipliers.py save|load FOLDER")
        sys.exit(125)
    status = main(*sys.argv[1:])
    dist.destroy_process_group()
    sys.exit(status)
