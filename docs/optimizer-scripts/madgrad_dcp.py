"""MADGRAD cannot be saved by get_optimizer_state_dict: it keeps a counter beside the parameters. One process, gloo."""

import torch
import torch.distributed as dist
from madgrad import MADGRAD
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

if __name__ == "__main__":
    print("torch", torch.__version__)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29515", rank=0, world_size=1)
    model = nn.Linear(4, 4)
    optimizer = MADGRAD(model.parameters(), lr=0.01)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    print("keys of its state:", [key if isinstance(key, str) else type(key).__name__ for key in optimizer.state])
    try:
        print(get_optimizer_state_dict(model, optimizer))
    except KeyError as error:
        print("KeyError:", error)
    dist.destroy_process_group()
