"""A small trainer whose axis `how` writes its checkpoints in ways that a crash tells apart."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shardproof.trainer import Trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class SavesVariously(Trainer):
    """One model, several writers."""

    axes = {"how": ["atomic", "two_files", "dcp", "starts_anew"], "mesh": ["2", "1"]}

    def build(self, cell):
        self.cell = cell
        torch.manual_seed(cell.seed)
        self.model = torch.nn.Linear(8, 4)
        if cell.how == "dcp":
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, index):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def save(self, folder):
        if self.cell.how == "dcp":
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            return
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        kept = {"both": states} if self.cell.how != "two_files" else states
        if self.cell.rank == 0:
            for name, state in kept.items():
                with (folder / f"{name}.new").open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(folder / f"{name}.new", folder / f"{name}.pt")
        dist.barrier()

    def load(self, folder):
        if self.cell.how == "dcp":
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            return
        files = {path.stem: path for path in folder.glob("*.pt")}
        if self.cell.how == "starts_anew" and not files:
            return
        kept = {name: torch.load(path) for name, path in files.items()}
        kept = kept.get("both", kept)
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
