"""torch's FullyShardedDataParallel (FSDP1) as its users write it: wrap, step, and save one of its kinds of state dict.

* full: every rank gathers whole tensors, and rank 0 writes them into one file;
* sharded: ShardedTensors in a distributed checkpoint (DCP), of which `load_sharded_optimizer_state_dict` reads the
  optimizer, as its documentation shows;
* state_dict: what DCP's own `get_state_dict` and `set_state_dict` make of model and optimizer;
* dtensor: the same, of DTensors, which FSDP1 makes where it was given a device mesh;
* local: what lies on each rank, which the same ranks alone can load.

In full precision gradients are exact. In bf16 a real network runs, since a gradient that is exact in bf16 on several
ranks need not be so on one. Offload is no axis: FSDP1 asks torch for an accelerator as soon as it offloads.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shardproof.trainer import Cell, Trainer, Unsupported
from torch.distributed import fsdp
from torch.distributed._shard.api import load_with_process_group
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

Sharded = fsdp.FullyShardedDataParallel
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
}
PRECISIONS = {
    "fp32": None,
    "bf16": fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-reduced": fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}
KEPT = ("model", "optimizer")


class FSDP1(Trainer):
    """A tiny model under FullyShardedDataParallel, resumed from each of its kinds of state dict."""

    axes = {
        "mesh": ["2", "2x2"],
        "strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"],
        "kind": ["full", "sharded", "state_dict", "dtensor", "local"],
        "orig_params": [True, False],
        "optimizer": ["adamw", "adamw-foreach", "adamw-fused", "sgd"],
        "precision": ["fp32", "bf16", "bf16-reduced"],
        "model": ["dense", "short"],
    }

    def build(self, cell: Cell) -> None:
        """`short` has parameters that are smaller than the number of ranks."""
        self.cell = cell
        if cell.precision == "fp32":
            model = self.probe(cell.model, cell)
        else:
            torch.manual_seed(cell.seed)
            outputs = 5 if cell.model == "dense" else 2
            model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, outputs))
        hybrid = cell.strategy == "HYBRID_SHARD"  # shards within the mesh's last dim, and replicates over the first
        mesh = init_device_mesh(cell.device, (1, *cell.sizes)[-2:] if hybrid else (cell.world,))
        groups = (mesh.get_group(1), mesh.get_group(0)) if hybrid else mesh.get_group()
        self.model = Sharded(
            model,
            sharding_strategy=fsdp.ShardingStrategy[cell.strategy],
            auto_wrap_policy=ModuleWrapPolicy({type(next(model.children()))}),
            use_orig_params=cell.orig_params,
            mixed_precision=PRECISIONS[cell.precision],
            device_id=torch.device("cpu") if cell.device == "cpu" else torch.cuda.current_device(),
            **({"device_mesh": mesh} if cell.kind == "dtensor" else {"process_group": groups}),
        )
        if cell.kind in ("full", "sharded", "local"):
            # offloading, which is an optimizer's default, copies nothing on a CPU, and what was gathered is freed
            config = fsdp.FullOptimStateDictConfig(offload_to_cpu=False) if cell.kind == "full" else None
            kind = fsdp.StateDictType[f"{cell.kind.upper()}_STATE_DICT"]
            Sharded.set_state_dict_type(self.model, kind, optim_state_dict_config=config)
        self.optimizer = OPTIMIZERS[cell.optimizer](self.model.parameters())

    def step(self, index: int) -> None:
        if self.cell.precision == "fp32":
            loss = self.model(index)
        else:
            batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * index + self.cell.rank))
            loss = self.model(batch.to(self.cell.device)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        kind = self.cell.kind
        if kind in ("state_dict", "dtensor"):
            dcp.save(dict(zip(KEPT, get_state_dict(self.model, self.optimizer), strict=True)), checkpoint_id=folder)
            return
        kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if kind != "local":
            kept["optimizer"] = Sharded.optim_state_dict(self.model, self.optimizer)
        if kind == "sharded":
            dcp.save(kept, checkpoint_id=folder)
        elif kind == "local" or self.cell.rank == 0:
            torch.save(kept, folder / f"{self.cell.rank}.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        kind = self.cell.kind
        if kind in ("state_dict", "dtensor"):
            kept = dict(zip(KEPT, get_state_dict(self.model, self.optimizer), strict=True))
            dcp.load(kept, checkpoint_id=folder)
            model, optimizer = kept.values()
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            return
        if kind == "sharded":
            kept = {"model": self.model.state_dict()}
            dcp.load(kept, checkpoint_id=folder)
            kept |= load_sharded_optimizer_state_dict(kept["model"], "optimizer", dcp.FileSystemReader(folder))
        elif kind == "full":
            kept = torch.load(folder / "0.pt")
        elif len([*folder.iterdir()]) != self.cell.world:
            raise Unsupported("a local state dict is for the ranks that saved it")
        else:
            with load_with_process_group(self.model.process_group):
                kept = torch.load(folder / f"{self.cell.rank}.pt", weights_only=False)
        self.model.load_state_dict(kept["model"])
        if kind != "local":
            kept["optimizer"] = Sharded.optim_state_dict_to_load(self.model, self.optimizer, kept["optimizer"])
        self.optimizer.load_state_dict(kept["optimizer"])
