"""A small data-parallel trainer whose ranks cut one batch into parts; its axis `how` plants a mistake at a time."""

import torch
import torch.distributed as dist
from shardproof.trainer import Trainer
from torch.nn.parallel import DistributedDataParallel


class CutsItsBatch(Trainer):
    """A mean over all targets of the batch, wherever they are, and a clip."""

    axes = {"mesh": ["1", "2"], "how": ["right", "own_count", "not_scaled"]}
    alike = {"mesh": "rounding"}

    def build(self, cell):
        self.cell = cell
        torch.manual_seed(cell.seed)
        self.model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, index):
        g = torch.Generator().manual_seed(100 * index)
        x, y = torch.randn(8, 8, generator=g), torch.randint(0, 4, (8,), generator=g)
        y[:3] = -100
        n, r = self.cell.world, self.cell.rank
        x, y = (batch[r * 8 // n : (r + 1) * 8 // n] for batch in (x, y))
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(x), y, reduction="sum")
        count = (y >= 0).sum()
        if self.cell.how != "own_count":
            dist.all_reduce(count)
        if self.cell.how == "right":
            loss = loss * n
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()

    def save(self, folder):
        if self.cell.rank == 0:
            torch.save({"m": self.model.state_dict(), "o": self.optimizer.state_dict()}, folder / "last.pt")
        dist.barrier()

    def load(self, folder):
        kept = torch.load(folder / "last.pt")
        self.model.load_state_dict(kept["m"])
        self.optimizer.load_state_dict(kept["o"])
