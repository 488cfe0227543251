"""A small trainer whose axis `what` plants one mistake at a time that a line of it makes, and no state shows."""

import torch
import torch.distributed as dist
from shardproof.trainer import Trainer


class Rows:
    """Data that know where they are, and say so to no checkpoint."""

    def __init__(self):
        self.rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        self.position = 0

    def following(self):
        rows = self.rows[self.position : self.position + 4]
        self.position += 4
        return rows


class CountsForItself(Trainer):
    """A layer under SGD, whose gradient is averaged by hand."""

    axes = {"what": ["position", "turn"], "parts": [1, 2]}
    alike = {"parts": "rounding"}
    steps = (2, 1)

    def build(self, cell):
        self.cell, self.loaded = cell, False
        torch.manual_seed(cell.seed)
        self.model = torch.nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = Rows()
        self.data.position = 8 * cell.rank

    def step(self, index):
        if self.cell.what == "turn":
            self.data.position = 8 * index
        self.optimizer.zero_grad()
        for part in self.data.following().chunk(self.cell.parts):
            self.model(part).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            if not self.loaded:
                parameter.grad.data.div_(2)
        self.optimizer.step()

    def save(self, folder):
        if self.cell.rank == 0:
            torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / "last.pt")
        dist.barrier()

    def load(self, folder):
        model, optimizer = torch.load(folder / "last.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.loaded = self.cell.what == "turn"
