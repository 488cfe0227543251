"""Saving and loading through PyTorch's own state-dict and checkpoint APIs, as a user's training script does.

One function each for writing and reading, over a `TrainState`. Files lie in the operation's checkpoint
folder: DCP's own files for the `dcp` formats, `full.pt` for `full`. What torch has no API for (scheduler,
scaler, iteration) is stored beside model and optimizer under `extra`.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler

from harness.systems.torch_fsdp2 import CheckpointPlan

FULL_FILE = "full.pt"


@dataclass
class TrainState:
    """What a training script holds. iteration: optimizer steps taken. left_out: keys of the model's state dict that end
    in this are kept out of checkpoints; empty for none. times: how often the optimizer is given what a load has
    read."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    iteration: int = 0
    left_out: str = ""
    times: int = 1

    def model_part(self, options: StateDictOptions) -> dict[str, Any]:
        """The model's state dict, as far as checkpoints hold it."""
        part = get_model_state_dict(self.model, options=options)
        return {k: v for k, v in part.items() if not (self.left_out and k.endswith(self.left_out))}

    def set_model_part(self, part: dict[str, Any], options: StateDictOptions) -> None:
        lax = replace(options, strict=False) if self.left_out else options
        set_model_state_dict(self.model, part, options=lax)

    def extra(self) -> dict[str, Any]:
        """What torch's state-dict API does not cover."""
        return {
            "iteration": self.iteration,
            **({"scheduler": self.scheduler.state_dict()} if self.scheduler else {}),
            **({"scaler": self.scaler.state_dict()} if self.scaler else {}),
        }

    def set_extra(self, extra: dict[str, Any]) -> None:
        self.iteration = extra["iteration"]
        if self.scheduler:
            self.scheduler.load_state_dict(extra["scheduler"])
        if self.scaler:
            self.scaler.load_state_dict(extra["scaler"])


class _Application:
    """The Stateful wrapper of the DCP recipe."""

    def __init__(self, state: TrainState, options: StateDictOptions) -> None:
        self.state, self.options = state, options

    def state_dict(self) -> dict[str, Any]:
        return _sharded(self.state, self.options)

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        _restore(self.state, loaded, self.options)


def save(state: TrainState, plan: CheckpointPlan, path: Path) -> None:
    """Write a checkpoint into the folder `path`. Runs on all ranks; returns when the files are complete."""
    match plan.form:
        case "dcp":
            state_dict_saver.save(_sharded(state, _options(plan)), checkpoint_id=path)
        case "dcp-async":
            pending = state_dict_saver.async_save(_sharded(state, _options(plan)), checkpoint_id=path)
            assert isinstance(pending, Future)
            pending.result()
        case "dcp-stateful":
            state_dict_saver.save({"app": _Application(state, _options(plan))}, checkpoint_id=path)
        case "full":
            gathered = _sharded(state, _options(plan))
            if dist.get_rank() == 0:
                path.mkdir(parents=True, exist_ok=True)
                torch.save(gathered, path / FULL_FILE)
            dist.barrier()
        case other:
            raise ValueError(f"unknown checkpoint format {other!r}")


def load(state: TrainState, plan: CheckpointPlan, path: Path) -> None:
    """Read a checkpoint of `save` into the model, optimizer, schedule and scaler. Runs on all ranks."""
    options = _options(plan)
    match plan.form:
        case "dcp" | "dcp-async":
            target = _sharded(state, options)
            state_dict_loader.load(target, checkpoint_id=path)
            _restore(state, target, options)
        case "dcp-stateful":
            state_dict_loader.load({"app": _Application(state, options)}, checkpoint_id=path)
        case "full":
            _restore(state, _read_full(plan, path), options)
        case other:
            raise ValueError(f"unknown checkpoint format {other!r}")


def load_model_only(state: TrainState, plan: CheckpointPlan, path: Path) -> None:
    """Read only the parameters and persistent buffers of a checkpoint. Runs on all ranks."""
    options = _options(plan)
    if plan.form == "full":
        state.set_model_part(_read_full(plan, path)["model"], options)
        return
    model = state.model_part(options)
    target: dict[str, Any] = {"app": {"model": model}} if plan.form == "dcp-stateful" else {"model": model}
    state_dict_loader.load(target, checkpoint_id=path)
    state.set_model_part(model, options)


def _options(plan: CheckpointPlan) -> StateDictOptions:
    return StateDictOptions(
        full_state_dict=plan.form == "full",
        cpu_offload=plan.cpu_offload,
        strict=plan.strict,
        broadcast_from_rank0=plan.broadcast_from_rank0,
        flatten_optimizer_state_dict=plan.flatten,
    )


def _sharded(state: TrainState, options: StateDictOptions) -> dict[str, Any]:
    return {
        "model": state.model_part(options),
        "optim": get_optimizer_state_dict(state.model, state.optimizer, options=options),
        "extra": state.extra(),
    }


def _restore(state: TrainState, loaded: dict[str, Any], options: StateDictOptions) -> None:
    state.set_model_part(loaded["model"], options)
    for _ in range(state.times):
        set_optimizer_state_dict(state.model, state.optimizer, loaded["optim"], options=options)
    state.set_extra(loaded["extra"])


def _read_full(plan: CheckpointPlan, path: Path) -> dict[str, Any]:
    """The gathered checkpoint; with broadcast_from_rank0 only rank 0 has the tensors, every rank the extras."""
    if not plan.broadcast_from_rank0:
        return _torch_load(path)
    loaded = _torch_load(path) if dist.get_rank() == 0 else {"model": {}, "optim": {}, "extra": {}}
    extra = [loaded["extra"]]
    dist.broadcast_object_list(extra, src=0)
    return {**loaded, "extra": extra[0]}


def _torch_load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path / FULL_FILE, map_location="cpu", weights_only=True)
    return loaded
