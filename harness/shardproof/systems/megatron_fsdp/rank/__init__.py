"""Megatron-FSDP on one rank: built, trained, saved and loaded as its documentation does, through its public API.

That is `fully_shard_model` and `fully_shard_optimizer`, an optimizer of torch's or TransformerEngine's FusedAdam, and
torch's distributed checkpoints of the state dicts that those two prepare. The process group exists already and spans
the mesh. The library runs on the emulated CUDA device, its tensors on the CPU, since a mesh of gloo ranks is one of
CPUs. What a rank holds is read from the library's buffers; which rows these are is our own arithmetic
(`shardproof.mechanisms.row_buffers`).

*Verifies* nothing by itself. *Does not exercise* CUDA streams, NCCL, symmetric memory, fp8 parameters.
"""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.emulation import cuda, te_extension
from shardproof.emulation.used_symbols import forget_used_symbols, used_symbols
from shardproof.mechanisms.fused_adam import PRECISION_AWARE
from shardproof.mechanisms.probe_module import (
    DTYPE_NAME,
    TORCH_DTYPE,
    ProbeUnit,
    Slot,
    build_model,
    local_part,
    tensor_bytes,
)
from shardproof.mechanisms.row_buffers import owned_box
from shardproof.models import NamedParam
from shardproof.observe.numbers import numbers_of
from shardproof.observe.record import LIVE, Record
from shardproof.observe.settings import SETTING, settings_of
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.scenario import Scenario
from shardproof.systems.megatron_fsdp.accepts import IN_PLACE, STRATEGIES
from shardproof.systems.megatron_fsdp.contract import CONTRACT
from shardproof.systems.megatron_fsdp.rank.fused import MASTER, fused_adam, refresh_master, state_of
from shardproof.systems.megatron_fsdp.rank.meta import to_meta
from shardproof.torch_loop.loop import (
    STATE_ROLES,
    TorchRank,
    TrainState,
    as_state,
    context_of,
    rehearse,
    tensor_parallel,
)

R = TypeVar("R")


@cache
def library() -> None:
    """Import Megatron-FSDP on the emulated device, beside TransformerEngine. Once a process."""
    te_extension.library()
    with cuda.emulated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron_fsdp  # noqa: F401


def emulated(method: Callable[[Rank, Op], R]) -> Callable[[Rank, Op], R]:
    """Run an operation on the emulated device."""

    @wraps(method)
    def run(self: Rank, op: Op) -> R:
        with cuda.emulated():
            return method(self, op)

    return run


class Rank(TorchRank):
    """The `RankSystem` of `megatron-fsdp`: torch's training loop with the library's sharding, optimizer and
    observation."""

    def __init__(self, context: RankContext) -> None:
        library()
        super().__init__(context)
        self.fused = CONTRACT.fused(self.scenario)
        self.wrapped: Any = None

    @emulated
    def build(self, op: Op) -> None:
        import megatron_fsdp

        root = build_model(self.probe, op.init_seed)
        if self.context.mesh.tp > 1:
            tensor_parallel(root, self.mesh["tp"])
        if "meta" in self.scenario.options:
            to_meta(root)
        arguments = self._arguments(megatron_fsdp.fully_shard_model)
        if "one_call" in self.scenario.options:
            self.params = self.held_parameters(root)
            optimizer = self._neutral(self.make_optimizer(op.init_seed))
            self.wrapped, optimizer = megatron_fsdp.fully_shard(root, optimizer, **arguments)
            self.params = self.held_parameters(self.wrapped.module)
        else:
            self.wrapped = megatron_fsdp.fully_shard_model(root, **arguments)
            self.params = self.held_parameters(self.wrapped.module)
            optimizer = megatron_fsdp.fully_shard_optimizer(self._neutral(self.make_optimizer(op.init_seed)))
        self._start(optimizer, op.init_seed)
        self.state = TrainState(self.wrapped, optimizer, self.make_scheduler(optimizer), self.make_scaler(op.init_seed))

    @emulated
    def step(self, op: Op) -> None:
        super().step(op)

    @emulated
    def overflow(self, op: Op) -> None:
        super().overflow(op)

    @emulated
    def save(self, op: Op) -> None:
        held = {"model": self.wrapped.state_dict(), "optimizer": self.state.optimizer.state_dict()}
        state_dict_saver.save({**held, "extra": self.state.extra()}, checkpoint_id=self.context.checkpoint_path(op))

    @emulated
    def load(self, op: Op) -> None:
        target = {"model": self.wrapped.state_dict(), "optimizer": self.state.optimizer.state_dict()}
        target["extra"] = self.state.extra()
        state_dict_loader.load(target, checkpoint_id=self.context.checkpoint_path(op))
        self.wrapped.load_state_dict(target["model"], strict=False)
        self.state.optimizer.load_state_dict(target["optimizer"])
        self.state.set_extra(target["extra"])

    @emulated
    def load_model_only(self, op: Op) -> None:
        target = {"model": self.wrapped.state_dict()}
        state_dict_loader.load(target, checkpoint_id=self.context.checkpoint_path(op))
        self.wrapped.load_state_dict(target["model"], strict=False)

    def reload_params(self, op: Op) -> None:
        """Refresh the masters that FusedAdam keeps. The library's own main parameters are what a checkpoint's model
        part holds, and were loaded."""
        if PRECISION_AWARE in self.scenario.options:
            for fqn, parameter in self.params.items():
                if self._has_master(self.spec.param(fqn)):
                    refresh_master(self.state.optimizer, parameter)

    @emulated
    def observe(self, op: Op) -> Iterable[Record]:
        records = list(super().observe(op))
        records.append(self.text(op, "emulated", "symbols", "\n".join(sorted(used_symbols()))))
        return records

    # Construction

    def _arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The arguments of `fully_shard_model` for a scenario, spelled as in the installed release."""
        scenario, options = self.scenario, self.scenario.options
        main = CONTRACT.main_params(scenario)
        known = inspect.signature(function).parameters
        hybrid = self.context.mesh.dp_replicate > 1
        arguments: dict[str, Any] = {
            "device_mesh": self.mesh,
            "dp_shard_dim": "dp_shard",
            "dp_outer_dim": "dp_replicate" if hybrid else None,
            "tp_dim": "tp" if "tp" in (self.mesh.mesh_dim_names or ()) else None,
            "hybrid_fsdp_group": self.mesh[("dp_replicate", "dp_shard")]._flatten("dp").get_group() if hybrid else None,
            "fsdp_unit_modules": [ProbeUnit],
            "zero_dp_strategy": STRATEGIES[scenario.sharding],
            "outer_dp_sharding_strategy": "optim" if self._outer else "no_shard",
            "device": torch.device("cpu"),
            "sync_model_each_microbatch": self._syncs_every,
            "overlap_grad_reduce": "no_overlap_reduce" not in options,
            "overlap_param_gather": "no_overlap_gather" not in options,
            "average_in_collective": "average_in_collective" in options,
            "enable_fine_grained_param_gather": "fine_grained_gather" in options,
            "init_model_with_meta_device": "meta" in options,
            "use_decoupled_grad": CONTRACT.reads_decoupled(scenario),
        }
        if "mixed_precision_policy" in known:
            from megatron_fsdp import MixedPrecisionPolicy

            arguments["mixed_precision_policy"] = MixedPrecisionPolicy(
                main_params_dtype=TORCH_DTYPE[main] if main else None,
                main_grads_dtype=TORCH_DTYPE[scenario.dtype.reduce] if scenario.dtype.reduce else None,
            )
        else:
            arguments["preserve_fp32_weights"] = main == "fp32"
            arguments["grad_reduce_in_fp32"] = scenario.dtype.reduce == "fp32"
        return {name: value for name, value in arguments.items() if name in known}

    @property
    def _outer(self) -> bool:
        """Whether replicas share the optimizer's work among themselves (`outer_dp_sharding_strategy`)."""
        return "outer_optim" in self.scenario.options and self.context.mesh.dp_replicate > 1

    @property
    def _syncs_every(self) -> bool:
        """Whether gradients are synchronised after every backward pass, as the library does by default."""
        return self.scenario.grad_sync == "every" or self.scenario.microbatches == 1

    def make_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with a tp dim also where its size is 1, unless the scenario wants none."""
        mesh, tp_dim = self.context.mesh, "no_tp_dim" not in self.scenario.options
        sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
        kept = {n: size for n, size in sizes.items() if size > 1 or n == "dp_shard" or (n == "tp" and tp_dim)}
        return init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))

    def make_optimizer(self, init_seed: int) -> torch.optim.Optimizer:
        if not self.fused:
            return super().make_optimizer(init_seed)
        ask = self.contract.at_build(self.scenario, init_seed)
        return fused_adam(self.scenario, ask, self.param_groups(ask))

    def _neutral(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as it is handed to the library: with a learning rate and weight decay of 0 where the
        scenario asks for a neutral start. Sharding takes a real step (megatron-fsdp-5976), which then moves nothing."""
        if "neutral_start" in self.scenario.options:
            for group in (optimizer.defaults, *optimizer.param_groups):
                group["lr"] = group["weight_decay"] = 0.0
        return optimizer

    def _start(self, optimizer: torch.optim.Optimizer, init_seed: int) -> None:
        """Give an optimizer with a neutral start the hyperparameters that were asked for, and set its counters back
        to step 0."""
        if "neutral_start" not in self.scenario.options:
            return
        for group, asked in zip(optimizer.param_groups, self.make_optimizer(init_seed).param_groups, strict=False):
            group["lr"], group["weight_decay"] = asked["lr"], asked["weight_decay"]
            if "step" in group:
                group["step"] = 0
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()

    # One step

    def backward(self, op: Op, *, overflow: bool) -> None:
        self.start_step()
        last = self.scenario.microbatches - 1
        for microbatch in range(self.scenario.microbatches):
            self.probe.slot = Slot(op.iteration, microbatch, overflow)
            waits = not self._syncs_every and microbatch != last
            with self.wrapped.no_sync() if waits else nullcontext():
                self.backward_of(self.wrapped(torch.ones(1, requires_grad=True)).sum())
        if not self._syncs_every:
            self.wrapped.finish_grad_sync()

    def update(self) -> None:
        """Step the optimizer without synchronising once more: that would install gradients as they were before
        unscaling and clipping."""
        again = "step_syncs" in self.scenario.options
        state, once = self.state, {} if again else {"sync_grad_before_optimizer_step": False}
        if state.scaler:
            state.scaler.step(state.optimizer, **once)
            state.scaler.update()
        else:
            step: Any = state.optimizer.step  # the library's own step, which has an argument of its own
            step(**once)
        state.optimizer.zero_grad()

    # Observation: reads only

    def model_records(self, op: Op) -> Iterator[Record]:
        for named in self.spec.params:
            canonical = named.spec.tied_to or named.fqn
            yield self.sharded(op, "param", named, self._model_weight(canonical))
            if named.spec.tied_to is None and self._has_master(named) and CONTRACT.has_masters(self.scenario, op):
                yield self.sharded(op, "master", named, self._master(named.fqn))
        for fqn, _ in self.spec.buffers():
            yield self.whole(op, "buffer", fqn, local_part(self.wrapped.module.get_buffer(fqn)))

    def _model_weight(self, fqn: str) -> torch.Tensor:
        """The rows of a model weight that this rank's optimizer updates; rows held only for the forward pass are left
        out."""
        raw = self.wrapped.raw_param[fqn]
        buffers = self.wrapped.param_and_grad_buffer
        weights = buffers.parameter_groups[buffers.param_to_param_group[raw]].model_weight_buffer
        if weights is None:
            return local_part(raw).detach()
        own: torch.Tensor = weights.get_item(weights.param_idx[raw], only_shard=True).detach()
        return own.view(-1, *local_part(raw).shape[1:]) if own.numel() else own.new_empty(self._box_of(fqn).size)

    def _has_master(self, named: NamedParam) -> bool:
        return self.probe.parameters[named.fqn].stages.master is not None and named.fqn in self.params

    def _master(self, fqn: str) -> torch.Tensor:
        """This rank's rows of a parameter's master: the main parameter, or a part of FusedAdam's state."""
        parameter = self.params[fqn]
        if not CONTRACT.masters_in_state(self.scenario):
            return local_part(parameter)
        return dict(state_of(self.state.optimizer, parameter))[MASTER]

    def optimizer_records(self, op: Op) -> Iterator[Record]:
        states = self.state.optimizer.state
        owned = {fqn: parameter for fqn, parameter in self.params.items() if local_part(parameter).numel()}
        for fqn, parameter in owned.items():
            if self.fused:
                yield from self._fused_records(op, fqn, parameter)
                continue
            for name, value in states.get(parameter, {}).items():
                if name not in STATE_ROLES:
                    yield self.unknown(op, f"{fqn}.{name}", value)
                    continue
                tensor = as_state(value)
                if tensor is None:
                    continue
                if tensor.dim():
                    yield self.sharded(op, STATE_ROLES[name], self.spec.param(fqn), local_part(tensor))
                else:
                    yield self.whole(op, STATE_ROLES[name], fqn, local_part(tensor))
        names = {id(parameter): fqn for fqn, parameter in owned.items()}
        for group in self.state.optimizer.param_groups:
            for fqn in (names[id(p)] for p in group["params"] if id(p) in names):
                for name, number in numbers_of(group):
                    yield self.number(op, "hyperparameter", f"{fqn}.{name}", number)
                for name, line in settings_of(group):
                    yield self.text(op, SETTING, f"{fqn}.{name}", line)

    def _fused_records(self, op: Op, fqn: str, parameter: nn.Parameter) -> Iterator[Record]:
        named = self.spec.param(fqn)
        for name, value in state_of(self.state.optimizer, parameter):
            if name == "step":
                yield self.whole(op, name, fqn, value)
            elif name != MASTER or not self._has_master(named):
                yield self.sharded(op, "master" if name == MASTER else name, named, value)

    def capture_gradients(self) -> None:
        if CONTRACT.reads_decoupled(self.scenario):
            found = {fqn: getattr(p, "decoupled_grad", None) for fqn, p in self.params.items()}
            self.gradients = {fqn: local_part(g).detach().clone() for fqn, g in found.items() if g is not None}
        else:
            super().capture_gradients()
        for fqn, parameter in self.params.items():  # an empty shard has no gradient, and must have none
            if fqn not in self.gradients and not local_part(parameter).numel():
                dtype = TORCH_DTYPE[self.probe.parameters[fqn].stages.main_grad]
                self.gradients[fqn] = local_part(parameter).detach().to(dtype, copy=True)

    def _box_of(self, fqn: str) -> Any:
        scenario, context = self.scenario, self.context
        sharded = scenario.sharding != "replicate"
        return owned_box(
            scenario.model, scenario.dtype, context.mesh, context.rank, fqn, sharded=sharded, outer=self._outer
        )

    def sharded(self, op: Op, role: str, named: NamedParam, local: torch.Tensor) -> Record:
        """A record of this rank's rows. Where they start is our arithmetic, how many there are the library's tensor
        says."""
        box = self._box_of(named.spec.tied_to or named.fqn)
        mesh = self.context.mesh
        # each tp rank cuts its copy in its own buffer
        copy = mesh.coordinate(self.context.rank)[2] if named.spec.tp_dim is None else 0
        return Record(
            op.index, self.context.rank, LIVE, role, named.fqn, DTYPE_NAME[local.dtype], named.spec.shape, box.start,
            tuple(local.shape), tensor_bytes(local), replica=copy,
        )  # fmt: skip


def warm_up() -> None:
    """Import the library and run a small scenario in this process, so that ranks forked from it inherit every lazy
    import. Leaves no process group behind."""
    library()
    base = Scenario(system="megatron-fsdp", program="build step save build load step", options=("neutral_start",))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            for sharding in ("fully_shard", *IN_PLACE):
                scenario = replace(base, sharding=sharding)
                rehearse(Rank(context_of(scenario, Path(folder, sharding))), scenario)
        finally:
            dist.destroy_process_group()
            forget_used_symbols()
