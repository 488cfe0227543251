"""After `train()`, DCP loads no state into a schedule-free optimizer, and says nothing. Two processes, CPU, gloo."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def made() -> tuple[nn.Module, AdamWScheduleFree]:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()  # as its documentation asks, before training
    return model, optimizer


def train(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29513", rank=rank, world_size=2)
    model, optimizer = made()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.eval()  # as its documentation asks, before saving
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)

    fresh, other = made()
    model_state, optimizer_state = get_state_dict(fresh, other)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(fresh, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    print(f"rank {rank}: saved {[sorted(s) for s in optimizer.state.values()]}")
    print(f"rank {rank}: loaded {[sorted(s) for s in other.state.values()]}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    mp.spawn(train, (tempfile.mkdtemp(),), nprocs=2)
