"""Optimizers whose state has few bits, and Muon, under FSDP2 with a distributed checkpoint (DCP).

torchao keeps moments in 8 or 4 bits with a scale for each block, or in fp8, as tensor subclasses; bitsandbytes keeps
them as integers beside tables of its own; torch's Muon steps whole matrices, and AdamW the bias. Where a rank has fewer
than 4,096 elements of a tensor they stay unquantised, so the larger matrix has more than that on every rank.

torchao compiles its step; on a CPU that is done without a compiler for C++, by the backend `aot_eager`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from shardproof.trainer import Cell, Trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

compiled = torch.compile


class LowBit(Trainer):
    """Two layers that are sharded, stepped by an optimizer whose state has few bits."""

    axes = {
        "mesh": ["2", "4"],
        "optimizer": ["AdamW8bit", "AdamW4bit", "AdamWFp8", "bnb.AdamW8bit", "Muon"],
    }
    requires = ("torchao==0.18.0", "bitsandbytes==0.50.2")

    def build(self, cell: Cell) -> None:
        self.cell = cell
        torch.manual_seed(cell.seed)
        layers = torch.nn.Linear(128, 256, bias=False), torch.nn.Linear(256, 8)
        self.model: Any = torch.nn.Sequential(*layers).to(cell.device)
        mesh = init_device_mesh(cell.device, (cell.world,))
        for module in (*self.model, self.model):
            fully_shard(module, mesh=mesh)
        self.optimizers = self.made(cell)

    def made(self, cell: Cell) -> list[torch.optim.Optimizer]:
        """The optimizers of the cell's kind."""
        params = list(self.model.parameters())
        if cell.optimizer == "Muon":
            matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
            return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
        library, _, name = cell.optimizer.rpartition(".")
        if library:
            import bitsandbytes

            return [getattr(bitsandbytes.optim, name)(params, lr=0.01)]
        import torchao.optim

        if cell.device == "cpu":
            torch.compile = partial(compiled, backend="aot_eager")
        return [getattr(torchao.optim, name)(params, lr=0.01)]

    def step(self, index: int) -> None:
        batch = torch.randn(4, 128, generator=torch.Generator().manual_seed(100 * index + self.cell.rank))
        self.model(batch.to(self.cell.device)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def kept(self) -> dict[str, Any]:
        """The state dicts, as DCP makes them."""
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizers), strict=True))

    def save(self, folder: Path) -> None:
        dcp.save(self.kept(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        kept = self.kept()
        dcp.load(kept, checkpoint_id=folder)
        model, optimizer = kept.values()
        set_state_dict(self.model, self.optimizers, model_state_dict=model, optim_state_dict=optimizer)
