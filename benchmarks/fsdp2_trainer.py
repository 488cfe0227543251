"""FSDP2 and DCP as a trainer, with the model, optimizer and checkpoint calls of the system torch-fsdp2."""

import torch
import torch.distributed.checkpoint as dcp
from shardproof.trainer import Trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Fsdp2(Trainer):
    axes = {"cell": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}  # noqa: RUF012 (a literal, read without running the file)

    def build(self, cell):
        torch.manual_seed(cell.seed)
        self.model = self.probe("dense", cell)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (cell.world,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)

    def step(self, index):
        self.optimizer.zero_grad()
        self.model(index).backward()
        self.optimizer.step()

    def save(self, folder):
        dcp.save(self.state_dicts(), checkpoint_id=folder)

    def load(self, folder):
        kept = self.state_dicts()
        dcp.load(kept, checkpoint_id=folder)
        model, optimizer = kept["model"], kept["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def state_dicts(self):
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))
