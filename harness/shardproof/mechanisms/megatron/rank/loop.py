"""Megatron-Core's training loop on one rank: it builds and steps as the library's training script does, through its
classes.

`MegatronLoop` is what systems over Megatron-Core derive their rank class from. They add their checkpoints (`save`,
`load`, `load_model_only`), and may wrap the model in something else than DDP (`data_parallel`) and say what a rank owns
(`owner_of`).

The process group exists already and spans the mesh. Everything of the library runs on the emulated CUDA device or,
where the scenario's device is cuda, on the rank's own GPU. The library is imported once, by a warm-up in the server or
by the first rank, and looks for apex and TransformerEngine when it is imported; which of them it finds, the variant in
SHARDPROOF_VARIANT says.

*Verifies* nothing by itself. *Does not exercise* CUDA streams and NCCL where the device is emulated; pipeline or
context parallelism; nor fp8 primary weights: a parameter is one if it is TransformerEngine's QuantizedTensor
(megatron/core/fp8_utils.py, is_float8tensor), a class that is not there without TransformerEngine, whose presence
switches on layers that need its kernels.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardproof.emulation import device as devices
from shardproof.emulation.used_symbols import forget_used_symbols
from shardproof.mechanisms.megatron.rank import importing
from shardproof.mechanisms.megatron.rank.observe import Owner, observe
from shardproof.mechanisms.megatron.rank.state import TrainState, local_box, release
from shardproof.mechanisms.megatron.rank.streams import Streams
from shardproof.mechanisms.megatron.switches import BUCKET_SIZE, OVERRIDE
from shardproof.mechanisms.param_scheduler import asked
from shardproof.mechanisms.probe_module import TORCH_DTYPE, Box, Probe, Slot, local_part
from shardproof.observe.record import Record
from shardproof.oracle.contract import half_dtype
from shardproof.program import Op, expand
from shardproof.protocol.system import RankContext
from shardproof.scenario import Optimizer, Scenario
from shardproof.torch_loop.loop import context_of

R = TypeVar("R")
S = TypeVar("S", bound="MegatronLoop")

QUIET = {
    # A distributed optimizer makes fp32 shards as views of their parameter, without detaching them, and reads their
    # gradient. Torch warns of that once a process.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # A hint about speed. There is a buffer for each dtype, so that a model with fp32 islands has its buckets in
    # another order than the forward.
    r"The next bucket's parameter all-gather operation has already been",
    # Each rank reads a checkpoint's `common_state` by itself, for which the library calls DCP's load with
    # `no_dist=True`, and with the state dict by its position (0.19).
    r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process",
    r"The argument order of load has been changed",
}
"""Warnings of a sound run, on a GPU as here, that are of no consequence. Any other is a difference."""

OPTIMIZER_DTYPE = TORCH_DTYPE | {"fp8e4m3": torch.uint8}
"""What the optimizer config calls a dtype: fp8 is uint8 there."""

VARIANT = "SHARDPROOF_VARIANT"
TE_VERSION = "2.10.0"  # the release whose FusedAdam is emulated


@cache
def library(device: str = "cpu") -> None:
    """Import Megatron-Core, once a process: on the emulated device or, on cuda, on the real one. What its variant
    wants it to find beside it is put there first."""
    from shardproof.emulation import apex

    with devices.on(device):
        te_stubbed = devices.provide(device, os.environ.get(VARIANT, "apex"))
        importing.library()
        from megatron.core import utils

        if te_stubbed:
            with apex.te_version_known(TE_VERSION):
                utils.get_te_version()
        importing.imported("shardproof.mechanisms.megatron.rank.model")


def emulated(method: Callable[[S, Op], R]) -> Callable[[S, Op], R]:
    """Make an operation run on the scenario's device: a GPU, or the emulated one, where checkpoint managers are
    forked, not spawned."""

    @wraps(method)
    def run(self: S, op: Op) -> R:
        with devices.on(self.scenario.device):
            return method(self, op)

    return run


class MegatronLoop:
    """One rank of Megatron-Core's training loop; a `RankSystem` once `save`, `load` and `load_model_only` are there.

    Attributes for systems: `context`, `scenario`, `spec`, `contract`, `probe`, and after a build `state`.
    """

    def __init__(self, context: RankContext) -> None:
        library(context.scenario.device)
        for message in QUIET:
            warnings.filterwarnings("ignore", message, UserWarning)
        self.context, self.contract = context, context.contract
        self.scenario, self.spec = context.scenario, context.model
        self.probe = Probe(context, self._box)
        self.state: TrainState
        self.owner: Owner | None = None
        self.gradients: dict[int, torch.Tensor] = {}
        self.norm: float | None = None
        self.hook = register_optimizer_step_pre_hook(self._capture)

    @emulated
    def build(self, op: Op) -> None:
        from shardproof.mechanisms.megatron.rank import model as models

        self._initialise_parallel()
        streams = self.streams()
        if streams:
            streams.seed(op.init_seed)
            self.probe.dropout = streams.draw
        ask = self.contract.at_build(self.scenario, op.init_seed)
        model = models.build(self.probe, op.init_seed)
        chunk = self.data_parallel(model)
        optimizer = self._optimizer(chunk, ask)
        scheduler = _scheduler(optimizer, ask, override=OVERRIDE in self.scenario.options)
        self.state = TrainState(
            self.scenario, self.spec, self.context.mesh, self.context.rank, release(), [chunk], optimizer, scheduler,
            streams,
        )  # fmt: skip
        self.owner = self.owner_of(self.state)

    @emulated
    def step(self, op: Op) -> None:
        self._train(op, overflow=False)
        self.state.iteration += 1

    @emulated
    def overflow(self, op: Op) -> None:
        self._train(op, overflow=True)

    @emulated
    def reload_params(self, op: Op) -> None:
        self.state.optimizer.reload_model_params()

    def unfreeze(self, op: Op) -> None:
        raise NotImplementedError("a limit: parameters cannot join a built optimizer")

    @emulated
    def observe(self, op: Op) -> Iterable[Record]:
        records = list(observe(self.state, op, self.probe, self.gradients, self.norm, self.contract, self.owner))
        return records + list(self.state.streams.records(op) if self.state.streams else ())

    # What systems override

    def data_parallel(self, model: torch.nn.Module) -> Any:
        """The model inside what reduces its gradients: Megatron's DistributedDataParallel."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        options = self.scenario.options
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.scenario.dtype.reduce == "fp32",
            overlap_grad_reduce="overlap_grad_reduce" in options,
            overlap_param_gather="overlap_param_gather" in options,
            use_distributed_optimizer=self.scenario.sharding == "zero1",
            num_distributed_optimizer_instances=self.context.mesh.dp_replicate,
            average_in_collective="average_in_collective" in options,
            bucket_size=None if "one_bucket" in options else BUCKET_SIZE,
        )
        return DistributedDataParallel(model.config, config, model)

    def streams(self) -> Streams | None:
        """The random generators that the script seeds and checkpoints keep; None where it keeps none."""
        return None

    def owner_of(self, state: TrainState) -> Owner | None:
        """The object that says what this rank owns, where the optimizer's groups of shards do not say it
        (Megatron-FSDP); None where they do."""
        return None

    @property
    def defers_sync(self) -> bool:
        """Whether the training script enters `no_sync` for all microbatches but the last."""
        return True

    @property
    def hooks_gather(self) -> bool:
        """Whether the forward's hooks gather parameters. A checkpoint has to wait for what they have begun."""
        return "overlap_param_gather" in self.scenario.options

    # Construction

    def _initialise_parallel(self) -> None:
        from megatron.core import parallel_state

        mesh = self.context.mesh
        if parallel_state.is_initialized():
            return
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.tp,
            expert_model_parallel_size=self.scenario.expert_parallel,
            expert_tensor_parallel_size=1 if self.scenario.expert_parallel > 1 else None,
            num_distributed_optimizer_instances=mesh.dp_replicate,
        )

    def _optimizer(self, chunk: Any, ask: Optimizer) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        known = {field.name for field in dataclasses.fields(OptimizerConfig)}
        values = _optimizer_config(self.scenario, ask)
        config = OptimizerConfig(**{name: value for name, value in values.items() if name in known})
        return get_megatron_optimizer(config, [chunk], **self._groups(chunk, ask))

    def _groups(self, chunk: Any, ask: Optimizer) -> dict[str, Any]:
        """How this release is told the group of each parameter: by overrides from 0.16 on, by conditions before."""
        names = {id(parameter): name for name, parameter in _root(chunk).named_parameters()}
        group_of = {p.fqn: p.spec.group if ask.groups == "model" else 0 for p in self.spec.unique_params}
        groups = self.spec.groups if ask.groups == "model" else self.spec.groups[:1]

        def group(parameter: torch.Tensor) -> int:
            return group_of[names[id(parameter)]]

        def decays(index: int) -> float | None:
            own = groups[index].weight_decay
            return None if own is None or ask.weight_decay == own else own / (ask.weight_decay or 1.0)

        if release() >= (0, 16, 0):
            return {"config_overrides": _overrides(groups, group, decays, ask)}
        scales = {g.lr_scale for g in groups} - {1.0}
        return {
            "no_weight_decay_cond": lambda name, parameter: decays(group(parameter)) == 0.0,
            "scale_lr_cond": lambda name, parameter: groups[group(parameter)].lr_scale != 1.0,
            "lr_mult": scales.pop() if scales else 1.0,
        }

    # One step

    def _train(self, op: Op, *, overflow: bool) -> None:
        """One iteration of the training script: all microbatches, gradient finalisation, update, schedule."""
        from megatron.core.distributed import finalize_model_grads

        self.probe.start_step()
        self.gradients, self.norm = {}, None
        chunk, optimizer = self.state.chunks[0], self.state.optimizer
        *first, last = (n for n in range(self.scenario.microbatches) if self.probe.has(op.iteration, n))
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with chunk.no_sync() if self.defers_sync else nullcontext():
            for microbatch in first:
                self._backward(Slot(op.iteration, microbatch, overflow))
        self._backward(Slot(op.iteration, last, overflow))
        finalize_model_grads([chunk])
        self.between(op)
        successful, norm, _ = optimizer.step()
        if successful:
            self.state.scheduler.step(increment=1)
            if self.scenario.optimizer.clip:
                self.norm = norm

    def between(self, op: Op) -> None:
        """Between the backward passes and the optimizer's step. Nothing happens here; it is a seam for boundary faults
        (`shardproof.faults.boundary.between`)."""

    def in_flight(self, finish: Callable[[], None]) -> None:
        """An asynchronous save has begun, and `finish` waits for its end: at once. It is a seam for boundary faults
        (`shardproof.faults.overlap`)."""
        finish()

    def _backward(self, slot: Slot) -> None:
        """Forward and backward of one microbatch."""
        self.probe.slot = slot
        loss = self.state.chunks[0](torch.ones(1, device="cuda", requires_grad=True)).sum()
        self.state.optimizer.scale_loss(loss).backward()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """With overlap_param_gather, what the training script does around a checkpoint: gather what the next forward
        would, and keep the hooks off until it is over."""
        if not self.hooks_gather:
            yield
            return
        for chunk in self.state.chunks:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in self.state.chunks:
            chunk.enable_forward_pre_hook()

    def _capture(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Copy the gradients that an optimizer is about to see, by the identity of the parameter that it steps."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None)
                gradient = parameter.grad if gradient is None else gradient
                if gradient is not None:
                    self.gradients[id(parameter)] = local_part(gradient.detach()).clone()

    def _box(self, fqn: str) -> Box:
        """The box of a parameter that this rank's forward computes with."""
        spec = self.spec.param(fqn).spec
        box = local_box(spec, self.context.mesh, self.context.rank, self.scenario.expert_parallel)
        return box.start, box.size


def _optimizer_config(scenario: Scenario, ask: Optimizer) -> dict[str, Any]:
    """The fields of OptimizerConfig that a scenario asks for; a release is given those that it knows."""
    half, policy, options = half_dtype(scenario.dtype), scenario.dtype, scenario.options
    fixed_scale = 1.0 if half == "fp16" and not ask.loss_scale else None
    fraction = scenario.offload.fraction
    dtypes = {
        "main_grads_dtype": policy.grad, "main_params_dtype": policy.master,
        "exp_avg_dtype": policy.exp_avg, "exp_avg_sq_dtype": policy.exp_avg_sq,
    }  # fmt: skip
    return {
        "optimizer": "sgd" if ask.kind == "sgd" else "adam",
        "lr": ask.lr, "min_lr": 0.0, "weight_decay": ask.weight_decay,
        "decoupled_weight_decay": ask.kind == "adamw",
        "adam_beta1": ask.beta1, "adam_beta2": ask.beta2, "adam_eps": ask.eps, "sgd_momentum": ask.momentum,
        "bf16": half == "bf16", "fp16": half == "fp16", "params_dtype": TORCH_DTYPE[half or "fp32"],
        "loss_scale": fixed_scale, "initial_loss_scale": ask.loss_scale or 1.0, "min_loss_scale": 1.0,
        "loss_scale_window": 2, "hysteresis": 2,
        "clip_grad": ask.clip,
        "use_distributed_optimizer": scenario.sharding == "zero1",
        "overlap_param_gather": "overlap_param_gather" in options,
        "use_precision_aware_optimizer": "precision_aware" in options,
        "optimizer_cpu_offload": fraction > 0, "optimizer_offload_fraction": fraction,
        "use_torch_optimizer_for_cpu_offload": "torch_offload" in options,
        "overlap_cpu_optimizer_d2h_h2d": "overlap_offload" in options,
        **{name: OPTIMIZER_DTYPE[dtype or "fp32"] for name, dtype in dtypes.items()},
    }  # fmt: skip


def _overrides(groups: Any, group: Callable[[Any], int], decays: Callable[[int], float | None], ask: Optimizer) -> Any:
    """The overrides of 0.16: a predicate for each group that asks for something of its own."""
    from megatron.core.optimizer import ParamKey
    from megatron.core.optimizer.optimizer_config import ParamPredicate

    overrides = {}
    for index, own in enumerate(groups):
        values: dict[str, float] = {}
        if (decay := decays(index)) is not None:
            values["wd_mult"] = decay
        if own.lr_scale != 1.0:
            values["max_lr"] = ask.lr * own.lr_scale
        if values:
            predicate = ParamPredicate(f"group{index}", lambda parameter, index=index: group(parameter) == index)
            overrides[ParamKey(predicate=predicate)] = values
    return overrides


def _scheduler(optimizer: Any, ask: Optimizer, *, override: bool) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, **asked(ask.schedule, ask.lr, ask.weight_decay), use_checkpoint_opt_param_scheduler=not override,
        override_opt_param_scheduler=override,
    )  # fmt: skip


def _root(chunk: Any) -> torch.nn.Module:
    module = chunk
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    assert isinstance(module, torch.nn.Module)
    return module


def warm_up(system: str, kind: type[MegatronLoop], lazily: Sequence[str] = ()) -> None:
    """Import the library and run small scenarios of a system in this process, so that ranks forked from it inherit
    every lazy import. Leaves no process group and none of the library's global state behind.

    Args:
        lazily: modules that are imported where a checkpoint is written or read, which no scenario here does. What a
            release does not have, or cannot import, a rank that needs it says.
    """
    library()
    with devices.on("cpu"):
        for module in lazily:
            with suppress(Exception):
                import_module(module)
    base = Scenario(system=system, sharding="zero1", program="build step")
    impl = "forloop" if os.environ.get(VARIANT) == "plain" else "multi_tensor"
    base = base.with_axes({"optimizer": f"adamw/impl={impl}", "dtype": "bf16/master=fp32"})
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            for sharding in ("zero1", "replicate"):
                rehearse(kind, replace(base, sharding=sharding), Path(folder))
        finally:
            dist.destroy_process_group()
            forget_used_symbols()


def rehearse(kind: type[MegatronLoop], scenario: Scenario, folder: Path) -> None:
    """Run a scenario's operations on one rank, here, and forget the library's state of it."""
    from megatron.core import parallel_state

    before = dict(vars(parallel_state))
    system = kind(context_of(scenario, folder))
    try:
        for op in expand(scenario):
            getattr(system, op.kind)(op)
            list(system.observe(op))
    finally:
        system.hook.remove()
        parallel_state.destroy_model_parallel()
        vars(parallel_state).update(before)  # it leaves some groups, which a forked process cannot destroy
