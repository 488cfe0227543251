"""A tiny model with exact gradients on DistributedDataParallel, so that steps on other meshes are compared too.

With `gradients` `doubled` every run doubles them in the same way, which its own arms cannot see, and the twin does.
"""

import torch
import torch.distributed as dist
from shardproof.trainer import Trainer
from torch.nn.parallel import DistributedDataParallel


class ProbedDdp(Trainer):
    """A probe in DDP."""

    axes = {"mesh": ["2", "4"], "gradients": ["mean", "doubled", "declined"]}
    steps = (1, 1)

    def build(self, cell):
        self.cell = cell
        self.model = DistributedDataParallel(self.probe("dense", cell, twin=cell.gradients != "declined"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, index):
        self.optimizer.zero_grad()
        self.model(index).backward()
        if self.cell.gradients == "doubled":
            for parameter in self.model.parameters():
                parameter.grad *= 2
        self.optimizer.step()

    def save(self, folder):
        if self.cell.rank == 0:
            torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / "last.pt")
        dist.barrier()

    def load(self, folder):
        model, optimizer = torch.load(folder / "last.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
