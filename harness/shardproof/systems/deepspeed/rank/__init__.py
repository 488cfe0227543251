"""DeepSpeed on one rank: initialised, trained, saved and loaded through its engine, as its documentation does.

The process group exists already and spans the mesh; the library runs on its own CPU accelerator, with gloo. What a rank
holds is read from the optimizer wrapper's flat tensors, never through `safe_get_full_*`, which communicates; where it
belongs is what `shardproof.systems.deepspeed.flat` says.

*Verifies* nothing by itself. *Does not exercise* streams, pinned memory, DeepSpeed's own kernels, NVMe.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import signature
from math import log2
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim.lr_scheduler import LRScheduler

from shardproof.emulation.used_symbols import touch, used_symbols
from shardproof.layout import Box
from shardproof.mechanisms.probe_module import DTYPE_NAME, Slot, tensor_bytes
from shardproof.models import NamedParam
from shardproof.observe.numbers import numbers_of
from shardproof.observe.record import LIVE, Record
from shardproof.observe.settings import SETTING, settings_of
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.scenario import Optimizer, Scenario
from shardproof.systems.deepspeed.accepts import (
    BOUNDARY,
    COALESCED,
    EAGER,
    NO_OPTIMIZER,
    NO_REDUCE_SCATTER,
    NO_SYNC,
    OFFLOADS,
    OVERLAP,
    PERSISTENT,
    SMALL_BUCKETS,
    STAGES,
    UNMANAGED,
    WRITER,
    caller_accumulates,
)
from shardproof.systems.deepspeed.contract import NO_SCHEDULE, OWN_SCHEDULES, WINDOW, hysteresis
from shardproof.systems.deepspeed.flat import (
    ALIGNED,
    ROUND_ROBIN,
    SUB_GROUP_SIZE,
    SUB_GROUPS,
    Piece,
    own_part,
    pieces,
    whole,
)
from shardproof.systems.deepspeed.schedule import asked_schedule
from shardproof.torch_loop.loop import STATE_ROLES, TorchRank, TrainState, as_state, context_of, rehearse
from shardproof.versions import TREE_VERSION

BUCKET, SMALL_BUCKET = 4096, 16
"""Elements of the buckets that gradients are reduced in, and parameters gathered."""

PERSISTENT_SIZE = 20
"""Elements below which stage 3 keeps a parameter whole, under the switch for it."""

FP16 = "the accelerator's answer that this CPU has fp16"

FLAT_TENSORS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""What the optimizer wrappers call the list of flat tensors that are stepped: that of stages 1 and 2, that of stage 3,
and the one that the engine takes for stage 1 in bf16 with gradients in fp32 (BF16_Optimizer)."""

UNSHARDED = "fp32_groups"
"""What FP16_UnfusedOptimizer calls its param groups of whole masters. It shards nothing, and no stage of ZeRO should
get it; from 0.17.6 to 0.18.4 stage 1 in bf16 with gradients in fp32 does."""


@cache
def library() -> Any:
    """The module `deepspeed`, imported on its CPU accelerator. Once a process.

    The accelerator's kernel for shared memory would be compiled when the first group is made: gloo does without. On a
    CPU without instructions for fp16 the accelerator refuses fp16, which torch calculates there all the same: its
    answer is replaced, and results that needed it say so.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ |= {"CROSS_RANK": "0", "CROSS_SIZE": "1"}  # as the library's launcher says it of a single machine
    with warnings.catch_warnings(), beside_its_version():
        warnings.simplefilter("ignore")
        deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    accelerator = deepspeed.accelerator.get_accelerator()
    if not accelerator.is_fp16_supported():
        accelerator.is_fp16_supported = _asked_for_fp16
    return deepspeed


@contextmanager
def beside_its_version() -> Iterator[None]:
    """A folder with the `version.txt` of a tree's repository as the current one, as it is for whoever runs the tree
    from there. A tree that no `setup.py` has installed reads its version from that file, or calls itself 0.0.0, and
    then refuses its own checkpoints as those of a version before 0.3.17."""
    version = os.environ.get(TREE_VERSION, "")
    if not version:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("version.txt").write_text(f"{version}\n")
        yield


def _asked_for_fp16() -> bool:
    touch(FP16)
    return True


def warm_up() -> None:
    """Run small scenarios in this process, so that ranks forked from it inherit every lazy import, some of which take
    seconds. Leaves neither a process group nor the library's own references to one behind."""
    comm, groups = library().comm.comm, library().utils.groups
    before = {name: copy(value) for name, value in vars(groups).items() if isinstance(value, dict | None)}
    base = Scenario(system="deepspeed", sharding="zero1", checkpoint="zero")
    base = base.with_axes({"dtype": "bf16", "program": "build step save build load step"})
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        os.environ["LOCAL_RANK"] = "0"
        try:
            for sharding in STAGES:
                scenario = replace(base, sharding=sharding)
                rehearse(Rank(context_of(scenario, Path(folder, sharding))), scenario)
        finally:
            dist.destroy_process_group()
            comm.cdb = None
            del os.environ["LOCAL_RANK"]
            vars(groups).update(before)


class Rank(TorchRank):
    """The `RankSystem` of `deepspeed`; probes and optimizers are those of the torch loop."""

    def __init__(self, context: RankContext) -> None:
        library()
        super().__init__(context)
        self.engine: Any = None
        self.loaded: str | None = ""
        """What DeepSpeed says it loaded last, None for nothing; it raises nothing then."""
        self.pieces: tuple[Piece, ...] = pieces(context.scenario, context.mesh, context.rank)
        self.flat_gradients: dict[int, torch.Tensor] = {}
        """Identity of a flat tensor → its gradient as the optimizer saw it in the last step."""

    # Operations of a program

    def build(self, op: Op) -> None:
        root = self.make_model(op.init_seed)
        self.params = self.held_parameters(root)
        optimizer = self.make_optimizer(op.init_seed)
        optimizer.register_step_pre_hook(self._see_gradients)
        own = config(self.scenario, self.contract.at_build(self.scenario, op.init_seed))
        if (name := self.scenario.optimizer.schedule) in OWN_SCHEDULES:
            kept = [group for group in optimizer.param_groups if group["params"]]  # the engine drops the others
            default = signature(library().runtime.lr_schedules.WarmupLR).parameters["warmup_max_lr"].default
            rates = [group["lr"] for group in kept]
            own["scheduler"] = asked_schedule(name, rates, rates_are_default=default is None)
        self.engine, _, _, scheduler = library().initialize(
            model=root, optimizer=optimizer, config=own, lr_scheduler=self._scheduler(), dist_init_required=False
        )
        if not self._sharding_tensors():
            self.pieces = whole(self.scenario)
        self.state = TrainState(root, optimizer, scheduler)

    def step(self, op: Op) -> None:
        self._train(op, overflow=False)
        if self.scenario.optimizer.clip:
            self.norm = torch.as_tensor(self.engine.get_global_grad_norm())
        if OFFLOADS in self.scenario.options:
            kinds = import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
            some = [kinds.lp_params, kinds.lp_grads, kinds.contiguous_grad_buffer]
            self.engine.offload_states(some if self.scenario.sharding == "fully_shard" else None)
            self.engine.reload_states()

    def overflow(self, op: Op) -> None:
        self._train(op, overflow=True)

    def save(self, op: Op) -> None:
        """Write a checkpoint; a universal one is made of it at once, by one rank while the others wait."""
        path = self.context.checkpoint_path(op)
        written = path.with_name(f"{path.name}_of_ranks") if self.universal else path
        self.engine.save_checkpoint(str(path.parent), tag=written.name)
        if self.universal:
            if self.context.rank == 0:
                convert(written, path)
            dist.barrier()

    @property
    def universal(self) -> bool:
        """Whether checkpoints are converted to DeepSpeed's universal format."""
        return self.scenario.checkpoint == "universal"

    def load(self, op: Op) -> None:
        path = self.context.checkpoint_path(op)
        self.loaded, _ = self.engine.load_checkpoint(
            str(path.parent), tag=path.name, load_lr_scheduler_states=NO_SCHEDULE not in self.scenario.options
        )

    def load_model_only(self, op: Op) -> None:
        path = self.context.checkpoint_path(op)
        alone = {"load_module_only": True}
        if NO_OPTIMIZER in self.scenario.options:
            alone = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
        self.engine.load_checkpoint(str(path.parent), tag=path.name, **alone)

    def reload_params(self, op: Op) -> None:
        """Refresh the masters from the model's parameters, but for what a universal checkpoint has given them."""
        if not self.contract.masters_in_model(self.scenario):
            self.engine.optimizer.refresh_fp32_params()

    def observe(self, op: Op) -> Iterable[Record]:
        yield from self.model_records(op)
        yield from self.optimizer_records(op)
        yield from self.schedule_records(op)
        if op.kind in ("step", "overflow"):
            yield from self.compute_records(op)
        if op.kind == "step":
            yield from self._gradient_records(op)
            if self.norm is not None:
                yield self.whole(op, "norm", "total_norm", self.norm)
        if self.scenario.dtype.storage == "fp16" and used_symbols():
            yield self.text(op, "emulated", "symbols", "\n".join(sorted(used_symbols())))

    # Construction

    def _scheduler(self) -> Any:
        """What the engine makes a schedule of torch's with, once it has the optimizer."""
        if self.scenario.optimizer.schedule in ("none", *OWN_SCHEDULES):
            return None

        def make(optimizer: torch.optim.Optimizer) -> LRScheduler | None:
            return self.make_scheduler(optimizer)

        return make

    # One step

    def _train(self, op: Op, *, overflow: bool) -> None:
        """Every microbatch's forward and backward pass and step, of which the engine takes the last one only; or one
        step at the end, where the caller says where accumulation ends.

        The engine divides the loss by `gradient_accumulation_steps`; ours count in full, so it is multiplied first.
        """
        self.start_step()
        self.flat_gradients = {}
        options, last = self.scenario.options, self.scenario.microbatches - 1
        with self.engine.coalesce_grad_reduction() if COALESCED in options else nullcontext():
            for microbatch in range(self.scenario.microbatches):
                self.probe.slot = Slot(op.iteration, microbatch, overflow)
                if BOUNDARY in options:
                    self.engine.set_gradient_accumulation_boundary(microbatch == last)
                with self.engine.no_sync() if NO_SYNC in options and microbatch < last else nullcontext():
                    loss = self.engine(torch.ones(1, requires_grad=True)).sum()
                    self.engine.backward(loss * self.engine.gradient_accumulation_steps())
                if microbatch == last:
                    self.between(op)
                elif not caller_accumulates(self.scenario):
                    self.engine.step()
        self.engine.step()

    def _see_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Copy what the optimizer is about to see: the library steps one flat tensor at a time."""
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    self.flat_gradients[id(flat)] = flat.grad.detach().clone()

    # Observation: reads only

    def own_box(self, named: NamedParam) -> Box:
        """Every rank has the model's parameters whole, but for stage 3."""
        return Box((0,) * len(named.spec.shape), named.spec.shape)

    def sharded(self, op: Op, role: str, named: NamedParam, local: torch.Tensor) -> Record:
        """A record of a parameter of the model: under stage 3 this rank's part of it."""
        part = getattr(self.state.model.get_parameter(named.fqn), "ds_tensor", None)
        if part is None:
            return super().sharded(op, role, named, local)
        start, count = own_part(named.spec.numel, self.context.mesh.dp, self.context.rank)
        return self._part(op, role, Piece(named, 0, 0, 0, start, count), part)

    def optimizer_records(self, op: Op) -> Iterator[Record]:
        flats, states = self._flat_tensors(), self.state.optimizer.state
        groups = dict(enumerate(self.state.optimizer.param_groups))  # a load may have lost some
        for piece in self.pieces:
            flat = flats[piece.tensor]
            if self._has_master(piece):
                yield self._part(op, "master", piece, flat)
            if not piece.count:
                continue
            for name, value in states.get(flat, {}).items():
                if name not in STATE_ROLES:
                    yield self.unknown(op, f"{piece.named.fqn}.{name}", value)
                    continue
                tensor = as_state(value)
                if tensor is None:
                    continue
                if tensor.dim():
                    yield self._part(op, STATE_ROLES[name], piece, tensor)
                else:
                    yield self.whole(op, STATE_ROLES[name], piece.named.fqn, tensor)
            group = groups.get(piece.group, {})
            for name, number in numbers_of(group):
                yield self.number(op, "hyperparameter", f"{piece.named.fqn}.{name}", number)
            for name, line in settings_of(group):
                yield self.text(op, SETTING, f"{piece.named.fqn}.{name}", line)

    def schedule_records(self, op: Op) -> Iterator[Record]:
        if self.scenario.optimizer.schedule in OWN_SCHEDULES:
            own: Any = self.state.scheduler
            yield self.integer(op, "scheduler", "last_epoch", own.last_batch_iteration + 1)
        else:
            yield from super().schedule_records(op)
        scaler = self.engine.optimizer.loss_scaler if self.contract.loss_scale(self.scenario) else None
        if scaler is not None:
            yield self.whole(op, "scaler", "scale", torch.tensor(float(scaler.cur_scale)))
            stable = scaler.cur_iter - scaler.last_overflow_iter - 1
            yield self.integer(op, "scaler", "growth_tracker", stable)
            yield self.integer(op, "scaler", "hysteresis_tracker", scaler.cur_hysteresis)

    def _gradient_records(self, op: Op) -> Iterator[Record]:
        flats = self._flat_tensors()
        for piece in self.pieces:
            gradient = self.flat_gradients.get(id(flats[piece.tensor]))
            if gradient is not None:
                yield self._part(op, "grad", piece, gradient)

    def _flat_tensors(self) -> list[nn.Parameter]:
        """The tensors that the optimizer steps on this rank, flat or whole.

        Raises:
            RuntimeError: the engine took a wrapper that nothing here reads.
        """
        wrapper = self.engine.optimizer
        if name := self._sharding_tensors():
            flats: list[nn.Parameter] = getattr(wrapper, name)
            return flats
        if not hasattr(wrapper, UNSHARDED):
            raise RuntimeError(f"nothing of ours reads the state of DeepSpeed's {type(wrapper).__name__}")
        return [tensor for group in getattr(wrapper, UNSHARDED) for tensor in group]

    def _sharding_tensors(self) -> str:
        """The attribute of the engine's optimizer with this rank's flat tensors; empty where it shards nothing."""
        return next((name for name in FLAT_TENSORS if hasattr(self.engine.optimizer, name)), "")

    def _has_master(self, piece: Piece) -> bool:
        return self.probe.parameters[piece.named.fqn].stages.master is not None

    def _part(self, op: Op, role: str, piece: Piece, flat: torch.Tensor) -> Record:
        """A record of what a flat tensor holds of one parameter: the place is ours, the elements are the library's."""
        local = flat.detach().reshape(-1)[piece.at : piece.at + piece.count]
        return Record(
            op.index, self.context.rank, LIVE, role, piece.named.fqn, DTYPE_NAME[local.dtype], piece.named.spec.shape,
            (piece.start,), (local.numel(),), tensor_bytes(local), flat=True,
        )  # fmt: skip


def convert(ranks: Path, universal: Path) -> None:
    """Convert a checkpoint of ranks to a universal one with the library's tool, in this process."""
    tool = import_module("deepspeed.checkpoint.ds_to_universal")
    tool.main(
        Namespace(
            input_folder=str(ranks), output_folder=str(universal), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def config(scenario: Scenario, ask: Optimizer) -> dict[str, Any]:
    """The engine's configuration for a scenario."""
    options = scenario.options
    counted = BOUNDARY in options or not caller_accumulates(scenario)
    bucket = SMALL_BUCKET if SMALL_BUCKETS in options else BUCKET
    zero: dict[str, Any] = {
        "stage": STAGES[scenario.sharding],
        "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
        "reduce_scatter": NO_REDUCE_SCATTER not in options,
        "overlap_comm": OVERLAP in options,
        "round_robin_gradients": ROUND_ROBIN in options,
    }  # fmt: skip
    if scenario.offload.fraction:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if ALIGNED in options:
        zero["parameter_alignment"] = True
    if scenario.sharding == "fully_shard":
        zero |= {
            "stage3_param_persistence_threshold": PERSISTENT_SIZE if PERSISTENT in options else 0,
            "stage3_prefetch_bucket_size": bucket,
        }
        if EAGER in options:
            zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        if SUB_GROUPS in options:
            zero["sub_group_size"] = SUB_GROUP_SIZE
    asked: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": scenario.microbatches if counted else 1,
        "gradient_clipping": ask.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if UNMANAGED in options:
        asked["managed_gradient_accumulation"] = False
    if scenario.checkpoint == "universal":
        asked["checkpoint"] = {"load_universal": True}
    if WRITER in options:
        asked["checkpoint"] = asked.get("checkpoint", {}) | {"writer": {"type": "python"}}
    if scenario.dtype.reduce:
        asked["data_types"] = {"grad_accum_dtype": scenario.dtype.reduce}
        asked["communication_data_type"] = scenario.dtype.reduce
    if scenario.dtype.storage == "bf16":
        asked["bf16"] = {"enabled": True}
    if scenario.dtype.storage == "fp16":
        asked["fp16"] = {
            "enabled": True, "loss_scale": 0 if ask.loss_scale else 1,
            "initial_scale_power": int(log2(ask.loss_scale or 1)), "loss_scale_window": WINDOW,
            "hysteresis": hysteresis(scenario), "min_loss_scale": 1,
        }  # fmt: skip
    return asked
