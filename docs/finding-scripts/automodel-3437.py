"""NeMo Automodel before 0.6.0: ranks of tensor parallelism resume with the random numbers of the first of them.

    pip install torch "nemo-automodel==0.5.0"
    python automodel-3437.py

Two ranks, one data-parallel and two tensor-parallel. Each makes its generators and saves them as the recipes of the
release do (`BaseRecipe.save_checkpoint`), draws, loads, and draws again: a rank whose generators come back draws the
same twice. On 0.5.0 rank 1 does not, and draws what rank 0 draws; on 0.6.0 both do. Ends with status 1 where it shows.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig
from nemo_automodel.components.training.rng import StatefulRNG


def resume(rank: int, folder: str, wrong) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    config = CheckpointingConfig(
        enabled=True, checkpoint_dir=folder, model_save_format="safetensors", model_cache_dir="", model_repo_id="",
        save_consolidated=False, is_peft=False,
    )
    keeper = Checkpointer(config, dp_rank=0, tp_rank=rank, pp_rank=0)
    rng = StatefulRNG(0, ranked=True)
    getattr(keeper, "save_on_global_ranks", keeper.save_on_dp_ranks)(rng, "rng", folder)
    dist.barrier()
    drawn = torch.rand(3)
    getattr(keeper, "load_on_global_ranks", keeper.load_on_dp_ranks)(rng, "rng", folder)
    again = torch.rand(3)
    print(f"rank {rank} drew {drawn.tolist()}, and after the load {again.tolist()}", flush=True)
    if not torch.equal(drawn, again):
        wrong.value += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    wrong = mp.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(resume, (folder, wrong), nprocs=2)
    print("ranks that draw other numbers after the load:", wrong.value)
    sys.exit(bool(wrong.value))
