"""torchtitan's own parts, as its trainer puts them together: `OptimizersContainer`, `LRSchedulersContainer`,
`ParallelAwareDataloader` and `CheckpointManager` around a model under FSDP2.

The data has three batches an epoch, so that a run is saved in its second epoch, in the middle of the data. `last` is
the checkpoint of a last step, which torchtitan writes at once even where it saves in the background.

The data's position belongs to one number of ranks, and torchtitan refuses another; a run on another mesh leaves it out
by `exclude_from_loading`, as its users do. torchtitan 0.2 makes these parts of one JobConfig, by functions that 0.3 no
longer has, so that this file is for 0.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from shardproof.trainer import Cell, Trainer, Unsupported
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import IterableDataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

BATCHES = 3
"""Batches of one rank in an epoch."""

TRAINING_STEPS = 8


class Rows(IterableDataset):  # type: ignore[type-arg]
    """Rows of noise, over and over, that know their place, as torchtitan's own data sets do."""

    def __init__(self, rank: int) -> None:
        self.rows = torch.randn(BATCHES * 2, 8, generator=torch.Generator().manual_seed(3 + rank))
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.place += 1
            yield self.rows[(self.place - 1) % len(self.rows)]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class TrainState:
    """How far training is: what torchtitan's trainer keeps as `train_state`."""

    step = 0
    ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class TorchTitan(Trainer):
    """A small network under FSDP2, HSDP or tensor parallelism, saved and resumed by `CheckpointManager`."""

    axes = {
        "mesh": ["2", "2x2"],
        "sharding": ["fsdp", "tp"],
        "async_mode": ["disabled", "async", "async_with_pinned_mem"],
        "checkpoint": ["interval", "last"],
        "dtype": ["float32", "mixed", "bfloat16"],
        "groups": ["one", "no_decay", "two_optimizers"],
        "implementation": ["for-loop", "foreach", "fused"],
        "decay_type": ["linear", "sqrt", "cosine"],
        "lr": [0.01, 0.003],
    }
    requires = (
        "torchtitan==0.3.0",
        "torchdata==0.11.0",
        "spmd_types==0.2.3",
        "tyro==1.0.17",
        "docstring_parser==0.18.0",
        "typeguard==4.6.1",
        "einops==0.8.2",
        "safetensors==0.8.0",
        "tokenizers==0.23.3",
    )
    steps = (4, 2)
    altered = {"lr": "checkpoint"}

    def build(self, cell: Cell) -> None:
        """What torchtitan's trainer builds, in its order."""
        self.cell = cell
        if cell.async_mode == "async_with_pinned_mem" and cell.device == "cpu" and cell.checkpoint == "interval":
            raise Unsupported("async_with_pinned_mem copies from an accelerator, and there is none")
        self.model = self.parallel(cell)
        self.start()

    def parallel(self, cell: Cell) -> torch.nn.Module:
        """The model, its layers cut over the last dimension of the mesh where that is tensor parallelism."""
        torch.manual_seed(cell.seed)
        model = torch.nn.Sequential()
        for name, layer in (
            ("inner", torch.nn.Linear(6, 8)),
            ("act", torch.nn.Tanh()),
            ("outer", torch.nn.Linear(8, 2)),
        ):
            model.add_module(name, layer)
        model.add_module("norm", torch.nn.LayerNorm(2))
        self.data_rank, self.data_ranks = cell.rank, cell.world
        dtype = torch.bfloat16 if cell.dtype == "bfloat16" else torch.float32
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cell.dtype == "mixed" else MixedPrecisionPolicy()
        )
        if cell.sharding == "tp":
            tp = cell.sizes[-1]
            mesh = init_device_mesh(cell.device, (cell.world // tp, tp), mesh_dim_names=("fsdp", "tp"))
            parallelize_module(model, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
            self.data_rank, self.data_ranks, mesh = mesh["fsdp"].get_local_rank(), mesh["fsdp"].size(), mesh["fsdp"]
        else:
            mesh = init_device_mesh(cell.device, cell.sizes, mesh_dim_names=("replicate", "fsdp")[-len(cell.sizes) :])
        return fully_shard(model.to(cell.device, dtype), mesh=mesh, mp_policy=policy)

    def start(self) -> None:
        """A run from its beginning: optimizers, schedules, data and what is counted."""
        kwargs = {"lr": self.cell.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kwargs)]
        if self.cell.groups != "one":
            name = "AdamW" if self.cell.groups == "no_decay" else "Adam"
            plain = {**kwargs, "lr": self.cell.lr / 2, "weight_decay": 0.0}
            groups.insert(0, ParamGroupConfig(pattern=r"bias$|norm", optimizer_name=name, optimizer_kwargs=plain))
        config = OptimizersContainer.Config(param_groups=groups, implementation=self.cell.implementation)
        self.optimizers = config.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_type=self.cell.decay_type, min_lr_factor=0.1)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=TRAINING_STEPS)
        self.dataloader = ParallelAwareDataloader(Rows(self.data_rank), self.data_rank, self.data_ranks, batch_size=2)
        self.batches = iter(self.dataloader)
        self.train_state = TrainState()

    def step(self, index: int) -> None:
        batch = next(self.batches).to(self.cell.device, next(self.model.parameters()).dtype)
        self.optimizers.zero_grad()
        torch.nn.functional.mse_loss(self.model(batch[:, :6]), batch[:, 6:]).backward()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.train_state.step += 1
        self.train_state.ntokens_seen += batch.numel()

    def manager(self, folder: Path, **given: Any) -> CheckpointManager:
        """The manager of a run whose checkpoints are in this folder."""
        config = CheckpointManager.Config(
            enable=True,
            folder=str(folder),
            interval=1,
            keep_latest_k=0,
            last_save_model_only=False,
            async_mode=self.cell.async_mode,
            **given,
        )
        return config.build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self.train_state},
            sd_adapter=None,
            base_folder="",
        )

    def save(self, folder: Path) -> None:
        manager = self.manager(folder)
        manager.save(self.train_state.step, last_step=self.cell.checkpoint != "interval")
        manager.maybe_wait_for_staging()
        manager.maybe_wait_for_saving()
        manager.close()

    def load(self, folder: Path) -> None:
        saved = next(folder.glob("step-*"))
        held = FileSystemReader(saved).read_metadata().state_dict_metadata
        other = sum(key.startswith("dataloader.dp_rank") for key in held) != self.data_ranks
        manager = self.manager(folder, exclude_from_loading=["dataloader"] if other else [])
        manager.load()
        manager.close()
        self.batches = iter(self.dataloader)

    def state(self) -> dict[str, Any]:
        """What a checkpoint is for."""
        names = ("model", "optimizers", "lr_schedulers", "dataloader", "train_state")
        return {name: getattr(self, name) for name in names}
