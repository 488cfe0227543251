"""A small trainer on FSDP2, whose axis `what` plants one mistake at a time that a step shows."""

import torch
from shardproof.trainer import Trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class MeasuredSteps(Trainer):
    """Two micro-batches a step, a clip, and files of each rank's own."""

    axes = {"what": ["sound", "own_norm", "window"]}
    steps = (1, 1)

    def build(self, cell):
        self.cell = cell
        torch.manual_seed(cell.seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, index):
        batch = torch.Generator().manual_seed(100 * index + self.cell.rank)
        for _ in range(2):
            target = torch.randint(0, 4, (3,), generator=batch)
            output = self.model(torch.randn(3, 8, generator=batch))
            (torch.nn.functional.cross_entropy(output, target) / 2).backward()
            if self.cell.what == "window":  # a step ends inside of an accumulation
                self.update()
        if self.cell.what == "window":
            output.detach_()
            self.model(torch.ones(3, 8)).mean().backward()
        else:
            self.update()

    def update(self):
        if self.cell.what == "own_norm":
            parts = [parameter.grad.to_local() for parameter in self.model.parameters()]
            norm = torch.stack([part.square().sum() for part in parts]).sum().sqrt()
            for part in parts:
                part.mul_(0.1 / norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        torch.save({"model": model, "optimizer": optimizer}, folder / f"{self.cell.rank}.pt")

    def load(self, folder):
        kept = torch.load(folder / f"{self.cell.rank}.pt", weights_only=False)
        get_state_dict(self.model, self.optimizer)
        set_state_dict(self.model, self.optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
