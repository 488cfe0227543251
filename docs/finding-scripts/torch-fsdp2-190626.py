"""FSDP2 adds the tensor-parallel parts of a gradient in bf16, although reduce_dtype is fp32.

    python torch-fsdp2-190626.py    # two gloo ranks on a CPU

A norm under sequence parallelism is replicated over tensor-parallel ranks, and each of them has a part of its gradient:
here 1 and 2^-9. Their sum, 1.001953125, is exact in fp32. In bf16 it is 1. Seen with torch 2.13.0 on a CPU.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


class Norm(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))

    def forward(self, x):
        return self.weight * x


def main(rank, folder, status):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    norm = fully_shard(Norm(mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    tokens = torch.tensor([[1.0], [2.0**-9]]).expand(2, 4).bfloat16()
    norm(distribute_tensor(tokens, mesh["tp"], [Shard(0)])).sum().backward()
    gradient = norm.weight.grad.full_tensor()
    status.value = {1.0: 1, 1 + 2**-9: 0}.get(gradient[0].item(), 125)
    if rank == 0:
        print(f"torch {torch.__version__}: gradient {gradient[0].item()}, in fp32 {1 + 2**-9}")
    dist.destroy_process_group()


if __name__ == "__main__":
    status = torch.multiprocessing.get_context("spawn").Value("i", 125)
    torch.multiprocessing.spawn(main, (tempfile.mkdtemp(), status), nprocs=2)
    sys.exit(status.value)
