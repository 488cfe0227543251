"""The Trainer of Hugging Face Transformers, which owns its loop, resumed in the middle of a later epoch.

`max_steps` is the same however far a run goes, because schedules depend on it; a callback stops the run, and asks for
the checkpoint. The data has three batches an epoch, so that a run is saved after its first epoch and before the end of
another one: there the order of the shuffled data, the place in it and the random state of dropout have to come back.

`ignore_data_skip` and `save_only_model` are no axes: what they leave out of a resumed run they leave out by design.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from shardproof.trainer import Cell, Trainer, Unsupported
from transformers import Trainer as HuggingFaceTrainer
from transformers import TrainerCallback, TrainingArguments

BATCHES = 3
"""Batches that a rank draws in one epoch; an odd number, so that accumulation over two leaves one over."""


class Model(torch.nn.Module):
    """A model that returns its own loss, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.outer = torch.nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.dropout(self.norm(self.inner(input_ids).tanh()), 0.1, self.training)
        outputs = self.outer(hidden)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "outputs": outputs}


class TransformersTrainer(Trainer):
    """The Trainer of Transformers under DDP or FSDP2."""

    axes = {
        "sharding": ["ddp", "fsdp2"],
        "data": ["random", "sequential", "group_by_length", "dispatched"],
        "optim": ["adamw_torch", "sgd", "adafactor"],
        "lr_scheduler_type": ["linear", "cosine", "warmup_stable_decay"],
        "accumulation": [1, 2],
        "dtype": ["float32", "bfloat16"],
    }
    requires = (
        "transformers==5.24.0",
        "accelerate==1.15.0",
        "huggingface_hub==2.4.0",
        "tokenizers==0.23.3",
        "safetensors==0.8.0",
        "regex==2026.11.19",
        "pyyaml==6.0.4",
        "tqdm==4.70.1",
        "httpx2==2.16.2",
        "httpcore2==2.16.2",
        "truststore==0.10.5",
        "anyio==4.16.0",
        "sniffio==1.3.1",
        "h11==0.16.0",
        "idna==3.20",
    )
    steps = (5, 2)

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    epoch: float
    global_step: int

    def fit(self, cell: Cell, until: int, folder: Path | None, resume: Path | None) -> None:
        if cell.sharding == "fsdp2" and cell.optim == "adafactor":
            raise Unsupported("Transformers' own Adafactor mixes plain tensors with DTensors, which torch refuses")
        trainer = self.trainer(cell, folder or cell.folder)
        trainer.add_callback(Watch(self, until, folder is not None))
        trainer.train(resume_from_checkpoint=None if resume is None else str(next(resume.glob("checkpoint-*"))))

    def trainer(self, cell: Cell, output: Path) -> HuggingFaceTrainer:
        """Transformers' own Trainer, its arguments those that its users turn."""
        torch.manual_seed(cell.seed)
        model = Model().to(getattr(torch, cell.dtype))
        arguments = TrainingArguments(
            output_dir=str(output),
            max_steps=12,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=cell.accumulation,
            optim=cell.optim,
            learning_rate=0.01,
            warmup_steps=2,
            lr_scheduler_type=cell.lr_scheduler_type,
            lr_scheduler_kwargs={"num_decay_steps": 4} if cell.lr_scheduler_type == "warmup_stable_decay" else {},
            train_sampling_strategy="random" if cell.data == "dispatched" else cell.data,
            accelerator_config={"dispatch_batches": cell.data == "dispatched"},
            fsdp=cell.sharding == "fsdp2",
            fsdp_config={"cpu_ram_efficient_loading": False} if cell.sharding == "fsdp2" else None,
            use_cpu=cell.device == "cpu",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        if cell.device == "cpu" and cell.sharding == "fsdp2":
            self.shard_on_a_cpu()
        generator = torch.Generator().manual_seed(3)
        data = torch.randn(BATCHES * 2 * cell.world, 8, generator=generator).to(getattr(torch, cell.dtype))
        rows = [{"input_ids": row[:6], "labels": row[6:]} for row in data]
        return HuggingFaceTrainer(model=model, args=arguments, train_dataset=rows)

    def shard_on_a_cpu(self) -> None:
        """Accelerate's own kind for several CPU processes ignores FSDP without a word, so its state is told that these
        ranks are several devices, all of them CPUs."""
        PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))

    def state(self) -> dict[str, Any]:
        """What the callback saw last."""
        return {name: getattr(self, name) for name in ("model", "optimizer", "lr_scheduler", "epoch", "global_step")}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Shows each update to the trainer under test, and stops the run after the last one, with or without a save."""

    def __init__(self, owner: TransformersTrainer, until: int, save: bool) -> None:
        self.owner, self.until, self.save = owner, until, save

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Called once for each update, before a save."""
        owner = self.owner
        owner.model, owner.optimizer, owner.lr_scheduler = given["model"], given["optimizer"], given["lr_scheduler"]
        owner.epoch, owner.global_step = state.epoch, state.global_step
        owner.updated()
        control.should_training_stop = state.global_step >= self.until
        control.should_save = control.should_training_stop and self.save
        return control
