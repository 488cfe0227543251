"""Lightning's Trainer, which owns its loop, resumed between two epochs and inside one.

`max_epochs` is the same however far a run goes, because a schedule depends on it; a callback stops the run. Lightning
keeps no random state in its checkpoints, so the model has no dropout, and the loader has a generator of its own.
FSDPStrategy is no value of `strategy`: it refuses every accelerator but a GPU. Nor are workers of the loader one of
`data`: what is forked from a rank that has threads hangs now and then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from shardproof.trainer import Cell, Trainer, Unsupported
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


class Module(lightning.LightningModule):
    """A model with its optimizer and its schedule, as Lightning wants them."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
        )

    def configure_model(self) -> None:
        """Shards the model, over the mesh that ModelParallelStrategy has made."""
        if self.cell.strategy.startswith("fsdp2"):
            for module in (self.model[0], self.model[3], self.model):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.model(batch[:, :6]), batch[:, 6:])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.cell.schedule == "one_cycle":
            scheduler: Any = OneCycleLR(optimizer, 0.01, total_steps=int(self.trainer.estimated_stepping_batches))
        else:
            scheduler = LambdaLR(optimizer, lambda count: 1 / (1 + count))
        interval = "epoch" if self.cell.schedule == "epoch" else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


class LightningTrainer(Trainer):
    """The Trainer of Lightning with DDP, or with FSDP2 in ModelParallelStrategy."""

    axes = {
        "strategy": ["ddp", "ddp_ema", "ddp_swa", "fsdp2", "fsdp2_whole_file"],
        "precision": ["32-true", "bf16-mixed", "bf16-true"],
        "accumulation": [1, 2],
        "clip": ["none", "norm", "value"],
        "schedule": ["step", "epoch", "one_cycle"],
        "data": ["plain", "stateful", "stateful_sampler"],
        "saved": ["at_epoch_end", "at_last_batch", "inside_epoch", "after_fit"],
    }
    requires = (
        "lightning==2.6.6",
        "lightning-utilities==0.15.3",
        "torchmetrics==1.9.0",
        "torchdata==0.11.0",
        "tqdm==4.70.1",
    )
    steps = (4, 3)

    def fit(self, cell: Cell, until: int, folder: Path | None, resume: Path | None) -> None:
        if cell.saved == "inside_epoch" and cell.data == "plain":
            raise Unsupported("Lightning begins the epoch anew where the loader has no state, and warns of it")
        if resume is not None and folder is not None and cell.saved != "inside_epoch" and until % 2:
            raise Unsupported("this cell saves at ends of epochs, of two updates each, and here it would inside of one")
        if cell.strategy in ("ddp_ema", "ddp_swa") and cell.saved == "after_fit":
            raise Unsupported("Lightning puts the averaged weights into the model at the end of fit")
        torch.manual_seed(cell.seed)
        self.module = Module(cell)
        trainer = lightning.Trainer(
            accelerator=cell.device,
            devices=cell.world,
            strategy=self.strategy(cell),
            precision=cell.precision,
            max_epochs=8,
            accumulate_grad_batches=cell.accumulation,
            gradient_clip_val=None if cell.clip == "none" else 0.1,
            gradient_clip_algorithm=None if cell.clip == "none" else cell.clip,
            callbacks=self.callbacks(cell, until, folder),
            logger=False,
            enable_checkpointing=folder is not None and cell.saved != "after_fit",
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(cell.folder),
        )
        checkpoint = None if resume is None else next(resume.iterdir())
        trainer.fit(self.module, self.loader(cell), ckpt_path=checkpoint, weights_only=False)
        if folder is not None and cell.saved == "after_fit":
            trainer.save_checkpoint(folder / "last.ckpt")

    def strategy(self, cell: Cell) -> Any:
        """Lightning's strategy; one that shards saves a file of each rank, or one of the whole model."""
        if cell.strategy.startswith("ddp"):
            return DDPStrategy()
        return ModelParallelStrategy(cell.world, 1, save_distributed_checkpoint=cell.strategy == "fsdp2")

    def callbacks(self, cell: Cell, until: int, folder: Path | None) -> list[lightning.Callback]:
        """Lightning's own, and one that shows each update; Lightning calls the one that saves last."""
        found: list[lightning.Callback] = []
        if cell.strategy == "ddp_ema":
            found.append(EMAWeightAveraging())
        if cell.strategy == "ddp_swa":
            found.append(StochasticWeightAveraging(0.05, swa_epoch_start=1))
        self.average = found[0] if found else None
        found.append(Watch(self, until))
        if folder is not None and cell.saved != "after_fit":
            often = {"every_n_epochs": 1} if cell.saved == "at_epoch_end" else {"every_n_train_steps": until}
            found.append(ModelCheckpoint(folder, **often))
        return found

    def loader(self, cell: Cell) -> DataLoader:
        """Batches of two rows: an epoch has two updates, or three where it is left after one of them. The last update
        of an epoch has fewer batches, where gradients accumulate."""
        batches = 1 + cell.accumulation * (2 if cell.saved == "inside_epoch" else 1)
        data = torch.randn(batches * 2 * cell.world, 8, generator=torch.Generator().manual_seed(3))
        data = data.to(torch.bfloat16 if cell.precision == "bf16-true" else torch.float32)
        given: dict[str, Any] = {"batch_size": 2, "generator": torch.Generator().manual_seed(5)}
        if cell.data == "plain":  # Lightning puts a DistributedSampler in the place of its sampler
            return DataLoader(data, shuffle=True, **given)
        sampler = DistributedSampler if cell.data == "stateful" else StatefulDistributedSampler
        return StatefulDataLoader(data, sampler=sampler(data), **given)

    def state(self) -> dict[str, Any]:
        """What the callback saw last."""
        found = {name: getattr(self, name) for name in ("optimizer", "scheduler", "epoch", "global_step", "batch")}
        average = getattr(self.average, "_average_model", None)
        return found | {"model": self.module.model} | ({} if average is None else {"average": average})


class Watch(lightning.Callback):  # type: ignore[misc]
    """Shows each update to the trainer under test, and stops the run after the last one."""

    def __init__(self, owner: LightningTrainer, until: int) -> None:
        self.owner, self.until = owner, until

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        """Called after each batch, before a save."""
        owner = self.owner
        schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        owner.optimizer, owner.scheduler = trainer.optimizers[0], schedulers[0] if schedulers else None
        owner.epoch, owner.global_step = trainer.current_epoch, trainer.global_step
        owner.batch = trainer.fit_loop.epoch_loop.batch_idx
        if not trainer.fit_loop._should_accumulate():
            owner.updated()
            trainer.should_stop = trainer.global_step >= self.until
