"""DeepSpeed alone: how far Muon moves a matrix with and without clipping, with a gradient that is below the threshold.

pip install "deepspeed==0.19.8"
DS_ACCELERATOR=cpu TORCHDYNAMO_DISABLE=1 python deepspeed_engine-8439.py    # one rank on a CPU, twenty seconds
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.distributed.init_process_group("gloo")


def moved(stage: int, clip: float) -> float:
    """How far one step moves a matrix of 64 × 64, of which the gradient has norm 0.5."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    gradient = torch.randn(64, 64)
    gradient /= 2 * gradient.norm()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    before = model.weight.detach().clone()
    engine.backward((engine(torch.eye(64)).t() * gradient).sum())
    engine.step()
    return float((model.weight.detach() - before).norm())


lengths = {(stage, clip): moved(stage, clip) for stage in (0, 1) for clip in (0.0, 1.0)}
for (stage, clip), length in lengths.items():
    print(f"stage {stage}, gradient_clipping {clip}: a gradient of norm 0.5 moves the matrix by {length:.4f}")
wrong = lengths[1, 1.0] < 0.9 * lengths[1, 0.0]
print(
    "stage 1 clips what Muon made of a gradient that was below the threshold" if wrong else "clipping changes nothing"
)
sys.exit(int(wrong))
