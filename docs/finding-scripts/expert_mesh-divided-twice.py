"""torch alone: fully_shard on a mesh of one rank, as the experts have it where expert parallelism takes all ranks.

pip install torch==2.13.0
python expert_mesh-divided-twice.py    # one gloo rank on a CPU, three seconds
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

FACTOR = 4.0

dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
wrong = 0
for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
    layer = torch.nn.Linear(2, 1, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    layer.set_gradient_divide_factor(FACTOR)
    if dtype == torch.float32:
        layer.set_force_sum_reduction_for_comms(True)  # as gloo needs it; in fp16 it happens without
    layer(torch.ones(1, 2)).sum().backward()
    factor = 1 / layer.weight.grad.full_tensor()[0, 0].item()
    print(f"reduced in {name}: a gradient of 1, to be divided by {FACTOR:.0f}, was divided by {factor:.0f}")
    wrong |= factor != FACTOR
sys.exit(int(wrong))
