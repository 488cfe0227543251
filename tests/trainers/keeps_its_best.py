"""A loop that ends with the best weights that it has seen, and forgets which those are where its axis says so."""

import copy

import torch
from shardproof.trainer import Trainer


class KeepsItsBest(Trainer):
    """One loop, whose loss grows."""

    axes = {"kept": [True, False]}
    steps = (2, 2)

    def fit(self, cell, until, folder, resume):
        torch.manual_seed(cell.seed)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        best, start, lowest = None, 0, float("inf")
        if resume:
            kept = torch.load(resume / "last.pt")
            start = kept["done"]
            self.model.load_state_dict(kept["model"])
            if cell.kept:
                best, lowest = kept["best"], kept["lowest"]
        for _ in range(start, until):
            batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
            self.optimizer.zero_grad()
            loss = -self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.updated()
            if -loss.item() < lowest:
                best, lowest = copy.deepcopy(self.model.state_dict()), -loss.item()
        if folder:
            kept = {"model": self.model.state_dict(), "best": best, "lowest": lowest, "done": until}
            torch.save(kept, folder / "last.pt")
        self.model.load_state_dict(best)
