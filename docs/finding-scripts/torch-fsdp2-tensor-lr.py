"""torch.distributed.checkpoint cannot load a learning rate that was saved as a tensor into an optimizer with a float.

Run with `python torch-fsdp2-tensor-lr.py`; needs torch alone. Status 1: the load raises; 0: it does not.
"""

import os
import sys

# Whatever else goes wrong ends with 125, which `git bisect run` skips.
sys.excepthook = lambda *error: (sys.__excepthook__(*error), print(end="", flush=True), os._exit(125))

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


def build(lr):
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(20000 + os.getpid() % 10000), RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
with tempfile.TemporaryDirectory() as folder:
    dcp.save({"optimizer": get_optimizer_state_dict(*build(torch.tensor(0.5)))}, checkpoint_id=folder)
    model, optimizer = build(0.125)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    wrong = False
    try:
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        wrong = float(optimizer.param_groups[0]["lr"]) != 0.5
        print(f"expected a learning rate of 0.5 after the load; observed {optimizer.param_groups[0]['lr']}")
    except CheckpointException as error:
        wrong = True
        print(f"expected that the checkpoint is loaded; observed {str(error).strip().splitlines()[-1]}")
dist.destroy_process_group()
sys.exit(int(wrong))
