"""Saving and loading through PyTorch's own state-dict and checkpoint APIs, as a user's training script does. Rank side.

`StateDictCheckpoint` has a method for writing and two for reading, over a `TrainState`. Files lie in the operation's
checkpoint folder: DCP's own for the `dcp` formats, with safetensors under `model` for `dcp-hf`, and `full.pt` for
`full`. What torch has no API for (scheduler, scaler, iteration) is stored beside model and optimizer under `extra`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from shardproof.mechanisms.fsdp2.formats import HUB, CheckpointPlan, checkpoint_plan, hub_folder
from shardproof.torch_loop.loop import TrainState

FULL_FILE = "full.pt"

InFlight = Callable[[Callable[[], None]], None]
"""Is given what waits for an asynchronous save that has begun, and sees to it that it is called."""


def at_once(finish: Callable[[], None]) -> None:
    """Wait for an asynchronous save right where it begins."""
    finish()


@dataclass(frozen=True)
class StateDictCheckpoint:
    """Writes and reads checkpoints of one format. Every method runs on all ranks.

    left_out: keys of the model's state dict that end in this are kept out of checkpoints; empty for none. loads: how
    often the optimizer is given what a load has read; twice, as by a user who keeps the state dict in memory to roll
    back to. partial: what a checkpoint of DCP does not have stays as it is.
    """

    plan: CheckpointPlan
    left_out: str = ""
    loads: int = 1
    partial: bool = False

    @classmethod
    def from_text(cls, text: str) -> StateDictCheckpoint:
        """The format that a scenario's `checkpoint` text names."""
        return cls(checkpoint_plan(text))

    def of_kept(self) -> StateDictCheckpoint:
        """As which a state dict is loaded that was kept in memory: what rank 0 alone was given, it has to broadcast
        (`StateDictOptions`: `cpu_offload` beside `full_state_dict` gives other ranks an empty dict)."""
        rank0_only = self.plan.form == "full" and self.plan.cpu_offload
        return replace(self, plan=replace(self.plan, broadcast_from_rank0=True)) if rank0_only else self

    def save(self, state: TrainState, path: Path, in_flight: InFlight = at_once) -> None:
        """Write a checkpoint into the folder `path`; the files are complete when this returns and, of an asynchronous
        save, what `in_flight` was given has been called."""
        if self.plan.form == "dcp-stateful":
            state_dict_saver.save({"app": _Application(self, state)}, checkpoint_id=path)
        else:
            self.write(self.content(state), path, in_flight)

    def write(self, content: dict[str, Any], path: Path, in_flight: InFlight = at_once) -> None:
        """Write a checkpoint of what `content` gave, now or earlier; otherwise like `save`."""
        planner = DefaultSavePlanner(enable_plan_caching=True) if self.plan.caching else None
        match self.plan.form:
            case "dcp":
                state_dict_saver.save(content, checkpoint_id=path, planner=planner)
            case "dcp-async":
                group = dist.new_group(backend="gloo")  # its own, since training goes on beside it
                pending = state_dict_saver.async_save(content, checkpoint_id=path, process_group=group, planner=planner)
                assert isinstance(pending, Future)
                in_flight(partial(_finish, pending, group))
            case "dcp-stateful":
                state_dict_saver.save({"app": content}, checkpoint_id=path)
            case "dcp-hf":
                self._write_hub(content["model"], path)
                rest = {name: part for name, part in content.items() if name != "model"}
                state_dict_saver.save(rest, checkpoint_id=path)
            case "full":
                if dist.get_rank() == 0:
                    path.mkdir(parents=True, exist_ok=True)
                    torch.save(content, path / FULL_FILE)
                dist.barrier()
            case other:
                raise ValueError(f"unknown checkpoint format {other!r}")

    def load(self, state: TrainState, path: Path) -> None:
        """Read a checkpoint of `save` into the model, optimizer, schedule and scaler."""
        match self.plan.form:
            case "dcp" | "dcp-async" | "dcp-hf":
                target = self._target(state, path)
                self._read(target, path)
                self.restore(state, target)
            case "dcp-stateful":
                self._read({"app": _Application(self, state, path)}, path)
            case "full":
                loaded = _read_full(self.plan, path)
                if state.streams:
                    loaded["extra"]["rng"] = state.streams.own(loaded["extra"]["rng"])
                self.restore(state, loaded)
            case other:
                raise ValueError(f"unknown checkpoint format {other!r}")

    def load_model_only(self, state: TrainState, path: Path) -> None:
        """Read only the parameters and persistent buffers of a checkpoint."""
        if self.plan.form == "full":
            self._set_model(state, _read_full(self.plan, path)["model"])
            return
        model = self._model(state)
        target: dict[str, Any] = {"app": {"model": model}} if self.plan.form == "dcp-stateful" else {"model": model}
        self._read(target, path)
        self._set_model(state, model)

    def load_optimizer_only(self, state: TrainState, path: Path) -> None:
        """Read only the optimizer's state and param groups of a checkpoint."""
        if self.plan.form == "full":
            self._set_optimizer(state, _read_full(self.plan, path)["optim"])
            return
        part = get_optimizer_state_dict(state.model, state.optimizer, options=_options(self.plan))
        target: dict[str, Any] = {"app": {"optim": part}} if self.plan.form == "dcp-stateful" else {"optim": part}
        self._read(target, path)
        self._set_optimizer(state, part)

    def load_schedule_only(self, state: TrainState, path: Path) -> None:
        """Read only what the learning-rate schedule keeps."""
        assert state.scheduler is not None
        if self.plan.form == "full":
            extra = _read_full(self.plan, path)["extra"]
        else:
            extra = {"scheduler": state.scheduler.state_dict()}
            target: dict[str, Any] = {"extra": extra}
            self._read({"app": target} if self.plan.form == "dcp-stateful" else target, path)
        state.scheduler.load_state_dict(extra["scheduler"])

    def content(self, state: TrainState) -> dict[str, Any]:
        """What is stored, and what a load reads into."""
        options = _options(self.plan)
        extra = state.extra()
        if state.streams and self.plan.form == "full":  # which one rank writes for all
            extra["rng"] = _gathered(extra["rng"])
        if self.plan.combined:
            model, optim = get_state_dict(state.model, state.optimizer, options=options)
            return {"model": self._stored(model), "optim": optim, "extra": extra}
        optim = get_optimizer_state_dict(state.model, state.optimizer, options=options)
        return {"model": self._model(state), "optim": optim, "extra": extra}

    def _target(self, state: TrainState, path: Path) -> dict[str, Any]:
        """What a load of a distributed checkpoint reads into: of the generators only those that it gives this rank."""
        target = self.content(state)
        if state.streams:
            before = "app.extra.rng." if self.plan.form == "dcp-stateful" else "extra.rng."
            names = FileSystemReader(path).read_metadata().state_dict_metadata
            held = {name.removeprefix(before) for name in names if name.startswith(before)}
            own = state.streams.own(dict.fromkeys(held))
            target["extra"]["rng"] = {n: value for n, value in target["extra"]["rng"].items() if n in own}
        return target

    def restore(self, state: TrainState, loaded: dict[str, Any]) -> None:
        """Give a training state what was read."""
        if self.plan.combined:
            self._set_both(state, loaded)
        else:
            self._set_model(state, loaded["model"])
            self._set_optimizer(state, loaded["optim"])
        for _ in range(self.loads - 1):
            self._set_optimizer(state, loaded["optim"])
        state.set_extra(loaded["extra"])

    def _read(self, target: dict[str, Any], path: Path) -> None:
        planner = DefaultLoadPlanner(allow_partial_load=True) if self.partial else None
        if self.plan.form == HUB and "model" in target:
            reader = HuggingFaceStorageReader(str(hub_folder(self.plan, path)))
            state_dict_loader.load(target["model"], storage_reader=reader, planner=planner)
            target = {name: part for name, part in target.items() if name != "model"}
        if target:
            state_dict_loader.load(target, checkpoint_id=path, planner=planner)

    def _write_hub(self, model: dict[str, Any], path: Path) -> None:
        files = {fqn: 1 + number % 2 for number, fqn in enumerate(model)} if self.plan.two_files else None
        writer = HuggingFaceStorageWriter(
            str(hub_folder(self.plan, path)), files, save_distributed=True, enable_consolidation=not self.plan.in_shards
        )
        state_dict_saver.save(model, storage_writer=writer)

    def _set_both(self, state: TrainState, loaded: dict[str, Any]) -> None:
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optim"],
            options=self._lenient(),
        )

    def _set_optimizer(self, state: TrainState, part: dict[str, Any]) -> None:
        set_optimizer_state_dict(state.model, state.optimizer, part, options=_options(self.plan))

    def _model(self, state: TrainState) -> dict[str, Any]:
        return self._stored(get_model_state_dict(state.model, options=_options(self.plan)))

    def _stored(self, part: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in part.items() if not (self.left_out and k.endswith(self.left_out))}

    def _set_model(self, state: TrainState, part: dict[str, Any]) -> None:
        set_model_state_dict(state.model, part, options=self._lenient())

    def _lenient(self) -> StateDictOptions:
        """The options of a load: what was left out of the checkpoint may be missing."""
        options = _options(self.plan)
        return replace(options, strict=False) if self.left_out else options


class _Application:
    """The Stateful wrapper of the DCP recipe. path: of the checkpoint that is loaded; None where one is saved."""

    def __init__(self, keeper: StateDictCheckpoint, state: TrainState, path: Path | None = None) -> None:
        self.keeper, self.state, self.path = keeper, state, path

    def state_dict(self) -> dict[str, Any]:
        return self.keeper._target(self.state, self.path) if self.path else self.keeper.content(self.state)

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        self.keeper.restore(self.state, loaded)


def _finish(pending: Future[Any], group: dist.ProcessGroup) -> None:
    """Wait for an asynchronous save, and give its process group back."""
    pending.result()
    dist.destroy_process_group(group)


def _gathered(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Named tensors of all ranks; of equal names that of the last rank."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, states)
    return {name: state for each in of_ranks for name, state in each.items()}


def _options(plan: CheckpointPlan) -> StateDictOptions:
    return StateDictOptions(
        full_state_dict=plan.form == "full",
        cpu_offload=plan.cpu_offload,
        strict=plan.strict,
        broadcast_from_rank0=plan.broadcast_from_rank0,
        flatten_optimizer_state_dict=plan.flatten,
        ignore_frozen_params=plan.ignore_frozen,
    )


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
