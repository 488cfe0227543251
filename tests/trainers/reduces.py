"""Data parallelism by hand, and mistakes in what is reduced over ranks."""

from pathlib import Path

import torch
import torch.distributed as dist
from shardproof.trainer import Cell, Trainer


class Reduces(Trainer):
    """how: `once`; `never`; `each`, after every chunk, together with what was reduced before; `clipped`, by a norm
    to which every rank adds a part of its own that it does not reduce."""

    axes = {"how": ["once", "never", "each", "clipped"], "chunks": [1, 2]}
    alike = {"chunks": "rounding"}

    def build(self, cell: Cell) -> None:
        self.model = torch.nn.Linear(8, 4)
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.rank, self.how, self.chunks = cell.rank, cell.how, cell.chunks

    def step(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index * 2 + self.rank)
        for chunk in torch.randn(4, 8, generator=generator).chunk(self.chunks):
            self.model(chunk).square().sum().div(4).backward()
            if self.how == "each":
                self.reduce()
        if self.how in ("once", "clipped"):
            self.reduce()
        if self.how == "clipped":
            squares = [parameter.grad.square().sum() for parameter in self.model.parameters()]
            for parameter in self.model.parameters():
                parameter.grad.div_((torch.stack(squares).sum() + 9 * self.rank).sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)

    def save(self, folder: Path) -> None:
        if self.rank == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "last.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "last.pt")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
