"""Saving and loading a Megatron-Core training state as megatron/training/checkpointing.py of the same release does it.

One function each for writing, reading, and reading the weights only, over a `TrainState`. Files lie in the operation's
checkpoint folder: `mp_rank_*/model_optim_rng.pt` and `distrib_optim.pt` for the formats of torch.save, the library's
own files for those of `dist_checkpointing`. Runs inside a rank; the caller has the emulated device on.

*Verifies*: loads are validated as strictly as the library can (`RAISE_ALL`: every key of the checkpoint is asked
for, and every key asked for is there), so that a missing or unexpected key is a crash. *Does not verify* what was
written or loaded: the readers and the observation do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.emulation import device as devices
from shardproof.mechanisms.megatron.rank.state import TrainState
from shardproof.systems.megatron_core.formats import CheckpointPlan
from shardproof.systems.megatron_core.rank import fsdp

MODEL_FILE = "model_optim_rng.pt"
PARAMETER_STATE_FILE = "distrib_optim.pt"
CHECKPOINT_VERSION = 3.0
TRUST_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


InFlight = Callable[[Callable[[], None]], None]
"""Is given what waits for an asynchronous save that has begun, and sees to it that it is called."""


def save(state: TrainState, plan: CheckpointPlan, path: Path, in_flight: InFlight) -> None:
    """Write a checkpoint into the folder `path`. Runs on all ranks; the files are complete when this returns and, of an
    asynchronous save, what `in_flight` was given has been called."""
    if plan.form == "fsdp_dtensor":
        fsdp.save(state, path)
    elif plan.legacy:
        _save_files(state, plan, path)
    else:
        _save_distributed(state, plan, path, in_flight)
    dist.barrier()


def load(state: TrainState, plan: CheckpointPlan, path: Path) -> None:
    """Read a checkpoint of `save` into model, optimizer, scheduler and iteration. Runs on all ranks."""
    if plan.form == "fsdp_dtensor":
        fsdp.load(state, path, whole=True)
        return
    with _trust(plan):
        loaded = _read_file(state, path) if plan.legacy else _read_distributed(state, plan, path, whole=True)
    state.chunks[0].load_state_dict(loaded["model"], strict=True)
    state.optimizer.load_state_dict(loaded["optimizer"])
    if plan.form == "dp_zero":
        state.optimizer.load_parameter_state(str(_folder(state, path) / PARAMETER_STATE_FILE))
    state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    state.iteration = loaded["iteration"]
    if state.streams and (plan.legacy or "rng_state" in loaded):
        state.streams.restore(loaded["rng_state"])
    dist.barrier()


def load_model_only(state: TrainState, plan: CheckpointPlan, path: Path) -> None:
    """Read a checkpoint's weights and buffers only, as finetuning does; the optimizer is not told. On all ranks."""
    if plan.form == "fsdp_dtensor":
        fsdp.load(state, path, whole=False)
        return
    with _trust(plan):
        loaded = _read_file(state, path) if plan.legacy else _read_distributed(state, plan, path, whole=False)
    state.chunks[0].load_state_dict(loaded["model"], strict=True)
    dist.barrier()


@contextmanager
def _trust(plan: CheckpointPlan) -> Iterator[None]:
    """Let torch.load read any pickle, with the `trusted` switch: these files are our own."""
    if not plan.trusted:
        yield
        return
    before = os.environ.get(TRUST_VARIABLE)
    os.environ[TRUST_VARIABLE] = "1"
    try:
        with warnings.catch_warnings():
            # the variable is set on purpose
            warnings.filterwarnings("ignore", f"Environment variable {TRUST_VARIABLE}", UserWarning)
            yield
    finally:
        del os.environ[TRUST_VARIABLE]
        if before is not None:
            os.environ[TRUST_VARIABLE] = before


def _save_files(state: TrainState, plan: CheckpointPlan, path: Path) -> None:
    """The legacy format: each model-parallel rank's first data-parallel rank writes its model and common state."""
    folder = _folder(state, path)
    folder.mkdir(parents=True, exist_ok=True)
    if plan.form == "dp_zero":
        state.optimizer.save_parameter_state(str(folder / PARAMETER_STATE_FILE))
    if state.dp_index < state.scenario.expert_parallel:
        model = state.root.state_dict_for_save_checkpoint()  # type: ignore[operator]
        content = {**_common(state), "model": model, "optimizer": state.optimizer.state_dict()}
        content |= {"rng_state": state.streams.state()} if state.streams else {}
        torch.save(content, folder / MODEL_FILE)


def _read_file(state: TrainState, path: Path) -> dict[str, Any]:
    """The script of releases before 0.14 lets torch.load read any pickle of this file."""
    safe = None if state.release >= (0, 14, 0) else False
    loaded: dict[str, Any] = torch.load(_folder(state, path) / MODEL_FILE, map_location="cpu", weights_only=safe)
    return loaded


def _folder(state: TrainState, path: Path) -> Path:
    """Where a model-parallel rank's files lie, in the training script's words."""
    experts = state.scenario.expert_parallel
    return path / (f"mp_rank_{state.tp_index:02d}" + (f"_{state.dp_index % experts:03d}" if experts > 1 else ""))


def _save_distributed(state: TrainState, plan: CheckpointPlan, path: Path, in_flight: InFlight) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    if state.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
    metadata = _metadata(state, plan)
    content = {"iteration": state.iteration, **_sharded(state, metadata, loading=False, whole=True)}
    content |= {"rng_state": _generators(state)} if state.streams else {}
    again = plan.constant and "save" in state.strategies
    if not again:
        strategy = get_default_save_sharded_strategy("torch_dist")
        strategy.use_cached_ckpt_structure = plan.constant
        if (
            plan.constant
            and (read := getattr(state.strategies.get("load"), "cached_global_metadata", None)) is not None
        ):
            strategy.cached_global_metadata = read
        if plan.fully_parallel:
            strategy = FullyParallelSaveStrategyWrapper(strategy, _data_parallel_group(), plan.constant)
        state.strategies["save"] = strategy
    request = dist_checkpointing.save(
        content,
        str(path),
        state.strategies["save"],
        async_sharded_save=plan.asynchronous,
        validate_access_integrity=not again,
        content_metadata={key: value for key, value in metadata.items() if key != "dp_cp_group"},
    )
    if request is not None:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)

        def finish() -> None:
            with devices.on(state.scenario.device):
                queue.maybe_finalize_async_calls(blocking=True)
                queue.close()

        in_flight(finish)


@contextmanager
def without_preload() -> Iterator[None]:
    """An asynchronous save without the copy to the CPU that it makes before it returns: it writes the live tensors."""
    from unittest import mock

    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def preload(buckets: list[Any], *_: Any) -> list[Any]:
        return [(*names, (data, [(item, _live(tensor)) for item, tensor in kept])) for *names, (data, kept) in buckets]

    with mock.patch.object(FileSystemWriterAsync, "preload_tensors", staticmethod(preload)):
        yield


def _live(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU, also where the device is emulated."""
    with torch._C.DisableTorchFunction():
        alias: torch.Tensor = torch._C._from_dlpack(torch._C._to_dlpack(tensor.detach()))
    return alias


def _read_distributed(state: TrainState, plan: CheckpointPlan, path: Path, *, whole: bool) -> dict[str, Any]:
    """What dist_checkpointing.load gives; with `whole` everything, otherwise the model, the rest being left there."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from megatron.core.dist_checkpointing.validation import StrictHandling

    common = dist_checkpointing.load_common_state_dict(str(path))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    metadata = {**metadata, **_groups(state)}
    strategy = get_default_load_sharded_strategy(str(path))
    if plan.fully_parallel:
        strategy = FullyParallelLoadStrategyWrapper(strategy, _data_parallel_group())
    state.strategies["load"] = strategy
    content = _sharded(state, metadata, loading=True, whole=whole)
    leaves = not whole
    if whole and state.streams:
        leaves = _stored_tp(path) != state.mesh.tp  # then the script ignores the generators' states
        content |= {} if leaves else {"rng_state": _generators(state)}
    strict = StrictHandling.RAISE_UNEXPECTED if leaves else StrictHandling.RAISE_ALL
    loaded: dict[str, Any] = dist_checkpointing.load(content, str(path), strategy, strict=strict)
    return loaded


def _generators(state: TrainState) -> Any:
    """The states of this rank's generators as the script of each release declares them: as one of tensor-parallel rank
    t, which data-parallel ranks have alike; in 0.16, under expert parallelism, as each rank's own."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    assert state.streams is not None
    own, mesh, tp, dp = state.streams.state(), state.mesh, state.tp_index, state.dp_index
    if state.scenario.expert_parallel > 1 and (0, 16, 0) <= state.release < (0, 17, 0):
        return ShardedObject("rng_state", own, (1, mesh.tp, mesh.dp), (0, tp, dp), replica_id=0)
    return ShardedObject("rng_state", own, (1, mesh.tp), (0, tp), replica_id=dp)


def _stored_tp(path: Path) -> int:
    """The tensor-parallel size of the run that saved the generators. The script reads it of its stored arguments, of
    which there are none here."""
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    held = load_sharded_metadata(str(path))
    return max(int(entry.global_shape[1]) for entry in held.values() if entry.key == "rng_state")


def _sharded(state: TrainState, metadata: dict[str, Any], *, loading: bool, whole: bool) -> dict[str, Any]:
    """The sharded state dict of everything, or of the model."""
    content = {"model": state.root.sharded_state_dict(metadata=metadata)}  # type: ignore[operator]
    if not whole:
        return content
    # The optimizer looks for its parameters in the state dict made so far, by the identity of their data.
    optimizer = state.optimizer.sharded_state_dict(content, is_loading=loading, metadata=metadata)
    return {**_common(state), **content, "optimizer": optimizer}


def _common(state: TrainState) -> dict[str, Any]:
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "opt_param_scheduler": state.scheduler.state_dict(),
    }


def _metadata(state: TrainState, plan: CheckpointPlan) -> dict[str, Any]:
    """What the training script tells `sharded_state_dict` and stores beside the state."""
    metadata: dict[str, Any] = {}
    if plan.sharding_type is not None:
        metadata["distrib_optim_sharding_type"] = plan.sharding_type
    if plan.form == "fully_reshardable":
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = plan.mem_efficient
    if state.release >= (0, 14, 0):
        metadata |= {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {**metadata, **_groups(state)}


def _groups(state: TrainState) -> dict[str, Any]:
    """Process groups that newer releases expect in the metadata; never stored."""
    return {"dp_cp_group": _data_parallel_group()} if state.release >= (0, 16, 0) else {}


def _data_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)
