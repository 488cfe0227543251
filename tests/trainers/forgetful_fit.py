"""A loop that a framework would own, which forgets the random state of its dropout where its axis says so."""

import torch
import torch.distributed as dist
from shardproof.trainer import Trainer


class ForgetfulFit(Trainer):
    """One loop with dropout."""

    axes = {"forgets": [False, True]}
    steps = (1, 1)

    def fit(self, cell, until, folder, resume):
        torch.manual_seed(cell.seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        start = 0
        if resume:
            kept = torch.load(resume / "last.pt")
            start = kept["done"]
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            if not cell.forgets:
                torch.set_rng_state(kept["rng"])
        for index in range(start, until):
            batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(index))
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.updated()
        if folder and cell.rank == 0:
            kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": until,
                    "rng": torch.get_rng_state()}  # fmt: skip
            torch.save(kept, folder / "last.pt")
        dist.barrier()
