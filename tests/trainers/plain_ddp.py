"""A small trainer on DistributedDataParallel, whose axis `what` plants one mistake at a time."""

import time

import torch
import torch.distributed as dist
from shardproof.trainer import Trainer, Unsupported
from torch.nn.parallel import DistributedDataParallel


class PlainDdp(Trainer):
    """DDP and torch.save."""

    axes = {"what": ["sound", "forgets", "scales", "hangs", "refuses", "hides", "keeps_lr"], "lr": [0.01, 0.02]}
    steps = (1, 1)
    altered = {"lr": "run"}

    def build(self, cell):
        self.cell, self.stepped = cell, False
        if cell.what == "refuses":
            raise Unsupported("this stack has no such thing")
        torch.manual_seed(cell.seed)
        self.model = DistributedDataParallel(torch.nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cell.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        if cell.what == "hides":
            self.batches = iter([1, 2, 3])

    def step(self, index):
        if self.cell.what == "hangs" and self.cell.rank == 1 and index:
            time.sleep(1000)
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * index + self.cell.rank))
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(batch).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.stepped = True

    def save(self, folder):
        if self.cell.what == "scales" and self.stepped:
            self.scaler.update(2048.0)
        if self.cell.rank == 0:
            kept = [self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()]
            torch.save(kept, folder / "last.pt")
        dist.barrier()

    def load(self, folder):
        model, optimizer, scaler = torch.load(folder / "last.pt")
        self.model.load_state_dict(model)
        self.scaler.load_state_dict(scaler)
        if self.cell.what != "forgets":
            self.optimizer.load_state_dict(optimizer)
        if self.cell.what != "keeps_lr":
            self.optimizer.param_groups[0]["lr"] = self.cell.lr
