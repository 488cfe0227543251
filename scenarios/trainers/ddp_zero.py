"""torch's DistributedDataParallel with ZeroRedundancyOptimizer, which gives each rank the optimizer of some parameters.

A checkpoint is one file: `consolidate_state_dict` gathers the optimizer's state on rank 0, which writes it, and every
rank loads what is its own. Gradients are exact. Of two batches each contributes half of the gradient, the first of them
under `no_sync`. `overlap_with_ddp` is no axis: its hooks refuse gloo, where they may hang.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shardproof.trainer import Cell, Trainer
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {}),
}

KEPT = ("model", "optimizer", "scheduler")


class DDPZeRO(Trainer):
    """A tiny model under DistributedDataParallel, whose optimizer ZeroRedundancyOptimizer shares out."""

    axes = {
        "mesh": ["2", "4"],
        "optimizer": ["adamw", "adamw-foreach", "adamw-fused", "adam-amsgrad", "sgd", "adagrad"],
        "parameters_as_bucket_view": [False, True],
        "gradient_as_bucket_view": [False, True],
        "static_graph": [False, True],
        "accumulation": [1, 2],
        "groups": [1, 2],
        "schedule": [False, True],
        "model": ["dense", "tied"],
    }

    def build(self, cell: Cell) -> None:
        """`tied` has fewer parameters than there may be ranks. Buckets are small, so that there are several."""
        self.cell = cell
        self.model = DistributedDataParallel(
            self.probe(cell.model, cell).to(cell.device),
            bucket_cap_mb=0.0001,
            gradient_as_bucket_view=cell.gradient_as_bucket_view,
            static_graph=cell.static_graph,
        )
        first, *others = self.model.parameters()
        kind, options = OPTIMIZERS[cell.optimizer]
        self.optimizer = ZeroRedundancyOptimizer(
            [first, *others] if cell.groups == 1 else [{"params": [first], "weight_decay": 0.0}, {"params": others}],
            optimizer_class=kind,
            parameters_as_bucket_view=cell.parameters_as_bucket_view,
            lr=0.01,
            weight_decay=0.1,
            **options,
        )
        rate = 0.5 if cell.schedule else 1.0
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=rate)

    def step(self, index: int) -> None:
        last = self.cell.accumulation - 1
        for batch in range(self.cell.accumulation):
            with nullcontext() if batch == last else self.model.no_sync():
                (self.model(index) / self.cell.accumulation).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self.optimizer.consolidate_state_dict(to=0)
        if self.cell.rank == 0:
            torch.save({name: getattr(self, name).state_dict() for name in KEPT}, folder / "last.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        kept = torch.load(folder / "last.pt", map_location="cpu")
        for name in KEPT:
            getattr(self, name).load_state_dict(kept[name])

    def state(self) -> dict[str, Any]:
        """Of the scheduler, its place and its rate."""
        found = {"model": self.model, "optimizer": self.optimizer}
        return {**found, "epoch": self.scheduler.last_epoch, "rate": self.scheduler.get_last_lr()[0]}
