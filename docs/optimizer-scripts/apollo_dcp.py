"""DCP loads no moments into APOLLO, and says nothing: it has state before its first step. One process, gloo."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from apollo_torch import APOLLOAdamW
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def made() -> tuple[nn.Module, APOLLOAdamW]:
    model = nn.Linear(4, 4, bias=False)
    return model, APOLLOAdamW(model.parameters(), lr=0.01)


if __name__ == "__main__":
    print("torch", torch.__version__)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29516", rank=0, world_size=1)
    folder = tempfile.mkdtemp()
    model, optimizer = made()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
    fresh, other = made()
    model_state, optimizer_state = get_state_dict(fresh, other)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(fresh, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    print("saved", sorted(optimizer.state[model.weight]))
    print("loaded", sorted(other.state[fresh.weight]))
    dist.destroy_process_group()
