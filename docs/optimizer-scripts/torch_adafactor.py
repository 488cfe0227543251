"""torch.optim.Adafactor does not step on parameters that fully_shard has sharded. Two processes, CPU, gloo."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(rank: int) -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=2)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    try:
        optimizer.step()
        print(f"rank {rank}: it steps")
    except RuntimeError as error:
        print(f"rank {rank}: {error}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    mp.spawn(train, nprocs=2)
