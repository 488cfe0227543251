"""A small trainer whose axis `what` plants one mistake at a time in whose state is saved and loaded, and whose
gradients are averaged in some of its backwards alone."""

import torch
from shardproof.trainer import Trainer
from torch.nn.parallel import DistributedDataParallel


class Loop:
    """Steps with an optimizer of its own."""

    def __init__(self, model):
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


class SavesAnother(Trainer):
    """A layer under Adam with a schedule, in two files."""

    axes = {"mesh": ["2"], "what": ["schedule", "optimizer", "stale", "sync"]}
    steps = (2, 1)

    def build(self, cell):
        self.cell = cell
        torch.manual_seed(cell.seed)
        self.model = DistributedDataParallel(torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if cell.what == "optimizer":
            self.loop = Loop(self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self, index):
        optimizer = self.loop.optimizer if self.cell.what == "optimizer" else self.optimizer
        rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(8 * index + self.cell.rank))
        self.model.require_backward_grad_sync = True
        for part in rows.chunk(2):
            self.model(part).square().mean().backward()
            self.model.require_backward_grad_sync = self.cell.what != "sync"
        optimizer.step()
        optimizer.zero_grad()
        self.schedule.step()

    def save(self, folder):
        if self.cell.rank == 0:
            torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / "model.pt")
            torch.save(self.schedule.state_dict(), folder / "schedule.pt")

    def load(self, folder):
        model, optimizer = torch.load(folder / "model.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if self.cell.what == "stale":
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if self.cell.what != "schedule":
            self.schedule.load_state_dict(torch.load(folder / "schedule.pt"))
