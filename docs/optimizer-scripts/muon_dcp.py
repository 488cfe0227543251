"""muon.SingleDeviceMuon cannot be loaded by set_optimizer_state_dict: its step takes no closure. One process, gloo."""

import torch
import torch.distributed as dist
from muon import SingleDeviceMuon
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

if __name__ == "__main__":
    print("torch", torch.__version__)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29514", rank=0, world_size=1)
    model = nn.Linear(4, 4, bias=False)
    optimizer = SingleDeviceMuon(model.parameters())
    try:
        print(get_optimizer_state_dict(model, optimizer))  # what a load begins with: it makes the state by a step
    except TypeError as error:
        print(error)
    dist.destroy_process_group()
