"""A trainer whose stack calls torch.cuda whatever it runs on, already where it is imported, with a layer that every
rank has of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from shardproof.trainer import Trainer

DEVICE = torch.device("cuda", torch.cuda.current_device())


class Cuda(Trainer):
    axes = {"mesh": ["2"]}
    emulates = "cuda"
    local = ["own.*"]

    def build(self, cell):
        torch.manual_seed(cell.seed)
        shared, own = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        with torch.no_grad():
            own.weight += cell.rank
        self.model = torch.nn.ModuleDict({"shared": shared, "own": own}).to(cell.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.rank = cell.rank

    def step(self, index):
        self.optimizer.zero_grad()
        x = torch.ones(1, 2, device=DEVICE) * index
        self.model["own"](self.model["shared"](x)).sum().backward()
        for parameter in self.model["shared"].parameters():
            dist.all_reduce(parameter.grad)
        torch.cuda.synchronize()
        self.optimizer.step()

    def save(self, folder):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, folder / f"{self.rank}.pt")

    def load(self, folder):
        state = torch.load(folder / f"{self.rank}.pt", map_location=DEVICE)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
