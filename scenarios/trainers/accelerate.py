"""Hugging Face Accelerate as its users write it: `prepare`, `accumulate`, `save_state`, `load_state`.

One cell is one configuration of `Accelerator`: how parameters are sharded and which kind of state dict a checkpoint
holds, whether the optimizer sees a module's own parameters or FSDP1's flat ones, in which precision the forward runs,
over how many batches a gradient is accumulated, and how the data loader finds its place again. A batch comes from
Accelerate's own data loader, which shuffles, so that a run that resumes in the middle of an epoch is right only if both
its seed and its place are.

Offload is no axis: both plugins of FSDP ask torch for an accelerator as soon as they offload.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from shardproof.trainer import Cell, Trainer, Unsupported
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 6
"""Batches that a rank draws in one epoch. With one batch an update, a run is saved in its first epoch; with two, in its
second."""


class Accelerate(Trainer):
    """A small network with dropout under DDP, FSDP1 or FSDP2, resumed by `Accelerator.load_state`."""

    axes = {
        "sharding": ["ddp", "fsdp2-full", "fsdp2-sharded", "fsdp1-full", "fsdp1-sharded", "fsdp1-flat-sharded"],
        "precision": ["no", "bf16"],
        "accumulation": [1, 2],
        "data": ["skip", "stateful"],
        "optimizer": ["adamw", "sgd"],
    }
    requires = (
        "accelerate==1.15.0",
        "torchdata==0.11.0",
        "safetensors==0.8.0",
        "pyyaml==6.0.4",
        "tqdm==4.70.1",
        "huggingface_hub==0.36.0",
        "requests==2.32.5",
        "urllib3==2.5.0",
        "idna==3.11",
        "certifi==2025.10.5",
        "charset-normalizer==3.4.4",
    )  # the last six are for releases before 1.15
    steps = (4, 2)

    def build(self, cell: Cell) -> None:
        """Everything that a script prepares. The data has its own seed, as scripts set it once for all runs."""
        self.cell = cell
        self.accelerator = self.accelerator_of(cell)
        torch.manual_seed(cell.seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
        )
        if "flat" in cell.sharding:
            model = self.accelerator.prepare(model)  # its optimizer has to be made of the flat parameters
        optimizer: torch.optim.Optimizer
        if cell.optimizer == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        data = torch.randn(BATCHES * 4 * cell.world, 8, generator=torch.Generator().manual_seed(3))
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(TensorDataset(data[:, :6], data[:, 6:]), batch_size=4, shuffle=True, generator=generator)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.batches: Iterator[Any] = iter(())
        self.drawn = -1
        self.loaded = False

    def accelerator_of(self, cell: Cell) -> Accelerator:
        """The accelerator, with what a CPU needs around it. Accelerate's own kind for several CPU processes ignores the
        plugins of FSDP without a word, so its state is told that these ranks are several devices, all of them CPUs."""
        plugin = self.plugin(cell)
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        PartialState(cpu=cell.device == "cpu")
        if cell.device == "cpu" and plugin is not None:
            PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
        return Accelerator(
            cpu=cell.device == "cpu" and plugin is None,
            fsdp_plugin=plugin,
            mixed_precision=cell.precision,
            gradient_accumulation_steps=cell.accumulation,
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=True, data_seed=5, use_stateful_dataloader=cell.data == "stateful"
            ),
        )

    def plugin(self, cell: Cell) -> FullyShardedDataParallelPlugin | None:
        """The plugin that shards, or None for DDP. `fsdp1-flat` is FSDP1 whose optimizer sees the flat parameters."""
        if cell.sharding == "ddp":
            return None
        version, *flat, kind = cell.sharding.split("-")
        if version == "fsdp1" and kind == "full" and cell.device == "cpu":
            raise Unsupported("FSDP1's full state dict is moved to the CPU, which frees parameters that live there")
        newer = {"fsdp_version": 2} if version == "fsdp2" else {}
        if newer and "fsdp_version" not in signature(FullyShardedDataParallelPlugin).parameters:
            raise Unsupported("FSDP2 came with Accelerate 1.6")
        return FullyShardedDataParallelPlugin(
            **newer,
            state_dict_type=f"{kind}_state_dict",
            use_orig_params=not flat if version == "fsdp1" else None,
            cpu_ram_efficient_loading=False,
            sync_module_states=False,
        )

    def step(self, index: int) -> None:
        for batch in range(index * self.cell.accumulation, (index + 1) * self.cell.accumulation):
            inputs, targets = self.draw(batch)
            with self.accelerator.accumulate(self.model):
                outputs = self.model(inputs).float()  # with FSDP2 they come in bf16
                self.accelerator.backward(torch.nn.functional.mse_loss(outputs, targets))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def draw(self, batch: int) -> Any:
        """The batch of this number, counted from the start of training. A run that has just loaded finds its place in
        the epoch as Accelerate's guide says: by `skip_first_batches`, unless the loader's state came with the load."""
        if self.loaded or batch != self.drawn + 1 or batch % BATCHES == 0:
            loader = self.loader
            loader.set_epoch(batch // BATCHES)
            if batch % BATCHES and not (self.loaded and self.cell.data == "stateful"):
                loader = self.accelerator.skip_first_batches(loader, batch % BATCHES)
            self.batches = iter(loader)
        self.drawn, self.loaded = batch, False
        return next(self.batches)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))
        self.drawn, self.loaded = -1, True

    def state(self) -> dict[str, Any]:
        """What a checkpoint is for; the accelerator itself and the iterator are ways of driving it."""
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler")}
