"""A trainer that hands raw state dicts to torch.distributed.checkpoint, in the ways that its axis `how` names."""

import torch
import torch.distributed.checkpoint as dcp
from shardproof.trainer import Trainer
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.fsdp import fully_shard


class RawStateDicts(Trainer):
    """Two layers under FSDP2; the optimizer's state dict is the template that a load fills."""

    axes = {"how": ["warm", "template", "partial", "deduplicated"], "mesh": ["2"]}

    def build(self, cell):
        self.cell = cell
        torch.manual_seed(cell.seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if cell.how != "template":  # the optimizer's state is there before a load asks for it
            for p in self.model.parameters():
                p.grad = torch.zeros_like(p)
            for group in self.optimizer.param_groups:
                group["lr"], lr = 0.0, group["lr"]
                self.optimizer.step()
                group["lr"] = lr
            for state in self.optimizer.state.values():
                state["step"].zero_()
            self.optimizer.zero_grad()

    def step(self, index):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def states(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder):
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True) if self.cell.how == "deduplicated" else None
        dcp.save(self.states(), checkpoint_id=folder, planner=planner)

    def load(self, folder):
        found = self.states()
        planner = DefaultLoadPlanner(allow_partial_load=True) if self.cell.how == "partial" else None
        dcp.load(found, checkpoint_id=folder, planner=planner)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
