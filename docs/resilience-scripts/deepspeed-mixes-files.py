"""DeepSpeed loads a model and an optimizer of two different steps, and says nothing.

One process on a CPU; deepspeed 0.19.8, torch 2.13.0. Run it: python deepspeed-mixes-files.py
"""

import os
import shutil
import tempfile

os.environ.update(
    DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517"
)
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without this kernel
CONFIG = {
    "train_batch_size": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def engine():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, dist_init_required=True)[0]


folder = tempfile.mkdtemp()
trained = engine()
for step in (1, 2):
    trained.backward(trained(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum())
    trained.step()
    trained.save_checkpoint(folder, tag=f"step{step}")

# One of the two files is that of the step before, as after a copy that was cut off.
shutil.copy(f"{folder}/step1/mp_rank_00_model_states.pt", f"{folder}/step2/mp_rank_00_model_states.pt")

resumed = engine()
path, _ = resumed.load_checkpoint(folder)
weight = resumed.module.weight.detach().float().flatten()
master = resumed.optimizer.single_partition_of_fp32_groups[0].detach().flatten()[: weight.numel()]
shutil.rmtree(folder)
print(f"loaded {path}; the weights are off their own masters by up to {(weight - master).abs().max():.3f}")
assert (weight - master).abs().max() > 0.1, "the files were not mixed"
