"""PyTorch's FSDP2 and DCP on one rank: build, step, save, load and observe through the public API only.

The process group exists already and spans the mesh. What a record's box is comes from `harness.layout`,
never from the library; a local tensor of another shape than its box keeps its own shape in the record, so
that assembly reports it.

On cuda the mesh is one of GPUs, the model is moved there before it is sharded, and offload pins its memory.

*Verifies* nothing by itself. *Does not exercise*, on the CPU, streams, overlap or pinned memory.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.layout import Box as ShardBox
from harness.layout import shard_box
from harness.models import NamedParam, model_spec
from harness.observe.record import LIVE, Record, whole
from harness.probe_module import (
    DTYPE_NAME,
    TORCH_DTYPE,
    Box,
    Probe,
    ProbeModule,
    Slot,
    build_model,
    local_part,
    tensor_bytes,
)
from harness.program import Op, expand
from harness.scenario import Mesh, Optimizer, Scenario
from harness.systems import torch_fsdp2_checkpoint as checkpoint
from harness.systems.protocol import RankContext
from harness.systems.torch_fsdp2 import CheckpointPlan, checkpoint_plan

STATE_ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum", "step": "step"}

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip


class Fsdp2Rank:
    """The RankSystem of `torch-fsdp2`."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.scenario, self.spec = context.scenario, context.model
        self.mesh = _device_mesh(context)
        self.probe = Probe(self.scenario, self.spec, context.mesh, context.rank, self._forward_box)
        plan = checkpoint_plan(self.scenario.checkpoint)
        assert plan is not None, "the parent runs supported scenarios only"
        self.plan: CheckpointPlan = plan
        self.state: checkpoint.TrainState
        self.params: dict[str, nn.Parameter] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.norm: torch.Tensor | None = None

    def build(self, op: Op) -> None:
        root = self._model(op.init_seed)
        self._fully_shard(root)
        self.params = self._held(root)
        optimizer = self._optimizer(op.init_seed)
        self.state = checkpoint.TrainState(root, optimizer, self._scheduler(optimizer), self._scaler())

    def step(self, op: Op) -> None:
        self._backward(op, overflow=False)
        state, ask = self.state, self.scenario.optimizer
        if state.scaler:
            state.scaler.unscale_(state.optimizer)
        if ask.clip:
            norm = nn.utils.clip_grad_norm_(self.params.values(), ask.clip, foreach=ask.impl == "foreach" or None)
            self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._capture_gradients()
        self._update()
        if state.scheduler:
            state.scheduler.step()
        state.iteration += 1

    def overflow(self, op: Op) -> None:
        self._backward(op, overflow=True)
        if self.state.scaler:
            self.state.scaler.unscale_(self.state.optimizer)
        self._update()

    def save(self, op: Op) -> None:
        checkpoint.save(self.state, self.plan, self.context.checkpoint_path(op))

    def load(self, op: Op) -> None:
        checkpoint.load(self.state, self.plan, self.context.checkpoint_path(op))

    def load_model_only(self, op: Op) -> None:
        checkpoint.load_model_only(self.state, self.plan, self.context.checkpoint_path(op))

    def reload_params(self, op: Op) -> None:
        """Nothing to refresh: FSDP2's optimizer steps on the parameters themselves."""

    def unfreeze(self, op: Op) -> None:
        for named in self.spec.unique_params:
            if named.spec.trainable == "later":
                self.params[named.fqn].requires_grad_(True)

    def observe(self, op: Op) -> Iterable[Record]:
        yield from self._model_records(op)
        yield from self._optimizer_records(op)
        yield from self._schedule_records(op)
        if op.kind in ("step", "overflow"):
            yield from self._compute_records(op)
        if op.kind == "step":
            for fqn, gradient in self.gradients.items():
                yield self._sharded(op, "grad", self.spec.param(fqn), gradient)
            if self.norm is not None:
                yield self._whole(op, "norm", "total_norm", self.norm.float())

    # Construction

    def _model(self, init_seed: int) -> nn.Module:
        root = build_model(self.probe, init_seed).to(self.scenario.device)
        if "tp" in (self.mesh.mesh_dim_names or ()):
            tensor_parallel(root, self.mesh["tp"])
        return root

    def _held(self, root: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer is given, by canonical name."""
        return {p.fqn: root.get_parameter(p.fqn) for p in self.spec.unique_params}

    def _fully_shard(self, root: nn.Module) -> None:
        names = ("dp_replicate", "dp_shard") if self.context.mesh.dp_replicate > 1 else ("dp_shard",)
        options = {"mesh": self.mesh[names], **_policies(self.scenario)}
        units = sorted((m for m in self.spec.modules if m.unit), key=lambda m: -m.path.count("."))
        for module in units:
            fully_shard(root.get_submodule(module.path), **options)
        fully_shard(root, **options)

    def _optimizer(self, init_seed: int) -> torch.optim.Optimizer:
        ask = self.scenario.optimizer.at_build(init_seed)
        options: dict[str, Any] = {"lr": ask.lr, "weight_decay": ask.weight_decay}
        options |= {"foreach": ask.impl == "foreach", "fused": ask.impl == "fused"}
        if ask.kind == "sgd":
            options |= {"momentum": ask.momentum, "nesterov": ask.nesterov}
        else:
            options |= {"betas": (ask.beta1, ask.beta2), "eps": ask.eps, "capturable": ask.capturable}
        return OPTIMIZERS[ask.kind](self._groups(ask), **options)

    def _groups(self, ask: Optimizer) -> list[dict[str, Any]]:
        """The param groups that the scenario asks for."""
        if ask.groups == "one":
            return [{"params": list(self.params.values())}]
        return [
            {
                "params": [
                    self.params[p.fqn]
                    for p in self.spec.unique_params
                    if p.spec.group == index and p.fqn in self.params
                ],
                "lr": ask.lr * group.lr_scale,
                "weight_decay": ask.weight_decay if group.weight_decay is None else group.weight_decay,
            }
            for index, group in enumerate(self.spec.groups)
        ]

    def _scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        return StepLR(optimizer, step_size=1, gamma=0.5) if self.scenario.optimizer.schedule == "halve" else None

    def _scaler(self) -> torch.amp.GradScaler | None:
        scale = self.scenario.optimizer.loss_scale
        return torch.amp.GradScaler(self.scenario.device, init_scale=scale, growth_interval=2) if scale else None

    # One step

    def _backward(self, op: Op, *, overflow: bool) -> None:
        """All microbatches' forward and backward passes; the loss of each is the forward's output."""
        self.probe.start_step()
        self.gradients, self.norm = {}, None
        root, last = self.state.model, self.scenario.microbatches - 1
        for microbatch in range(self.scenario.microbatches):
            self.probe.slot = Slot(op.iteration, microbatch, overflow)
            if isinstance(root, FSDPModule):
                root.set_requires_gradient_sync(self.scenario.grad_sync == "every" or microbatch == last)
            loss = root(torch.ones(1, device=self.scenario.device, requires_grad=True)).sum()
            if self.state.scaler:
                loss = self.state.scaler.scale(loss)
            loss.backward()

    def _capture_gradients(self) -> None:
        """Copies of the gradients as the optimizer is about to see them."""
        self.gradients = {
            fqn: local_part(p.grad).detach().clone() for fqn, p in self.params.items() if p.grad is not None
        }

    def _update(self) -> None:
        state = self.state
        if state.scaler:
            state.scaler.step(state.optimizer)
            state.scaler.update()
        else:
            state.optimizer.step()
        state.optimizer.zero_grad()

    # Observation: reads only

    def _model_records(self, op: Op) -> Iterator[Record]:
        for named in self.spec.params:
            parameter = self.state.model.get_parameter(named.fqn)
            yield self._sharded(op, "param", named, local_part(parameter))
        for fqn, _ in self.spec.buffers():
            yield self._whole(op, "buffer", fqn, local_part(self.state.model.get_buffer(fqn)))

    def _compute_records(self, op: Op) -> Iterator[Record]:
        for fqn, kept in self.probe.seen.items():
            start, _ = self._forward_box(fqn)
            shape = self.spec.param(fqn).spec.shape
            for seen in kept:
                at = (op.index, self.context.rank, LIVE, "compute_param", fqn)
                yield Record(*at, seen.dtype, shape, start, seen.size, seen.data)

    def _optimizer_records(self, op: Op) -> Iterator[Record]:
        states = self.state.optimizer.state
        for fqn, parameter in self.params.items():
            yield from self._state_records(op, fqn, parameter, states.get(parameter, {}))
        names = {id(parameter): fqn for fqn, parameter in self.params.items()}
        for index, group in enumerate(self.state.optimizer.param_groups):
            text = "\n".join(names.get(id(p), "?") for p in group["params"]).encode()
            key = f"group{index}"
            yield whole(op.index, self.context.rank, "hyperparameter", f"{key}.params", "utf8", (len(text),), text)
            for name, number in hyperparameters(group):
                yield self._number(op, "hyperparameter", f"{key}.{name}", number)

    def _state_records(self, op: Op, fqn: str, parameter: nn.Parameter, state: dict[str, Any]) -> Iterator[Record]:
        """What the optimizer keeps of one parameter."""
        for name, value in state.items():
            if value is None:
                continue
            role, tensor = STATE_ROLES[name], torch.as_tensor(value)
            if isinstance(tensor, DTensor) and tensor.dim():
                yield self._sharded(op, role, self.spec.param(fqn), tensor.to_local())
            else:
                yield self._whole(op, role, fqn, local_part(tensor))

    def _schedule_records(self, op: Op) -> Iterator[Record]:
        if self.state.scheduler:
            yield self._integer(op, "scheduler", "last_epoch", self.state.scheduler.last_epoch)
            for index, lr in enumerate(self.state.scheduler.get_last_lr()):
                yield self._number(op, "scheduler", f"last_lr.{index}", float(lr))
        if self.state.scaler:
            saved = self.state.scaler.state_dict()
            yield self._whole(op, "scaler", "scale", torch.tensor(saved["scale"], dtype=torch.float32))
            yield self._integer(op, "scaler", "growth_tracker", saved["_growth_tracker"])

    def _sharded(self, op: Op, role: str, named: NamedParam, local: torch.Tensor) -> Record:
        """A record of this rank's shard: the box is ours, the size the library's."""
        return Record(
            op.index, self.context.rank, LIVE, role, named.fqn, DTYPE_NAME[local.dtype], named.spec.shape,
            self._own_box(named).start, tuple(local.shape), tensor_bytes(local),
        )  # fmt: skip

    def _own_box(self, named: NamedParam) -> ShardBox:
        """Where this rank's shard of a parameter lies."""
        mesh, rank = self.context.mesh, self.context.rank
        sizes = (mesh.dp_replicate, mesh.dp_shard, mesh.tp)
        return shard_box(named.spec.shape, sizes, mesh.coordinate(rank), self._tp_dim(named))

    def _whole(self, op: Op, role: str, fqn: str, tensor: torch.Tensor) -> Record:
        name, shape = DTYPE_NAME[tensor.dtype], tuple(tensor.shape)
        return whole(op.index, self.context.rank, role, fqn, name, shape, tensor_bytes(tensor))

    def _number(self, op: Op, role: str, fqn: str, number: float) -> Record:
        return whole(op.index, self.context.rank, role, fqn, "fp64", (), struct.pack("<d", number))

    def _integer(self, op: Op, role: str, fqn: str, number: int) -> Record:
        return whole(op.index, self.context.rank, role, fqn, "int64", (), struct.pack("<q", number))

    def _forward_box(self, fqn: str) -> Box:
        """What a forward computes with: the tensor-parallel shard, gathered over dp_shard."""
        named, mesh = self.spec.param(fqn), self.context.mesh
        tp_index = mesh.coordinate(self.context.rank)[2]
        box = shard_box(named.spec.shape, (1, 1, mesh.tp), (0, 0, tp_index), self._tp_dim(named))
        return box.start, box.size

    def _tp_dim(self, named: NamedParam) -> int | None:
        return named.spec.tp_dim if self.context.mesh.tp > 1 else None


class ProbeParallel(ParallelStyle):
    """Shards a module's parameters over tp as its spec says, replicates the rest, as torch's own styles do."""

    def __init__(self, done: dict[nn.Parameter, nn.Parameter]) -> None:
        super().__init__()
        self.done = done

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._partition)

    def _partition(self, _name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        assert isinstance(module, ProbeModule)
        for spec in module.spec.params:
            parameter = module.get_parameter(spec.name)
            if parameter not in self.done:
                placement = Replicate() if spec.tp_dim is None else Shard(spec.tp_dim)
                shared = distribute_tensor(parameter, device_mesh, [placement])
                self.done[parameter] = nn.Parameter(shared, requires_grad=parameter.requires_grad)
            module.register_parameter(spec.name, self.done[parameter])


def tensor_parallel(root: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism over every probe module; a tied parameter stays one object."""
    style = ProbeParallel({})
    plan: dict[str, ParallelStyle] = {
        path: style for path, module in root.named_modules() if isinstance(module, ProbeModule)
    }
    parallelize_module(root, mesh, plan)


def _device_mesh(context: RankContext) -> DeviceMesh:
    """The mesh of all ranks; dp_shard is always a dim, the others where they are larger than 1."""
    mesh = context.mesh
    sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(context.scenario.device, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _policies(scenario: Scenario) -> dict[str, Any]:
    """fully_shard's arguments besides the mesh."""
    dtype, after = scenario.dtype, scenario.reshard_after_forward
    param, reduce, output = (TORCH_DTYPE[d] if d else None for d in (dtype.param, dtype.reduce, dtype.output))
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    pinned = scenario.device == "cuda"  # pinning needs an accelerator
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=pinned) if scenario.offload.fraction else OffloadPolicy()
    return {
        "mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output),
        "reshard_after_forward": words[after] if after in words else int(after),
        "offload_policy": offload,
    }


def hyperparameters(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a param group of torch.optim that the conventions name."""
    yield "lr", float(group["lr"])
    yield "weight_decay", float(group["weight_decay"])
    if "betas" in group:
        yield "beta1", float(group["betas"][0])
        yield "beta2", float(group["betas"][1])
        yield "eps", float(group["eps"])
    else:
        yield "momentum", float(group["momentum"])
        yield "nesterov", float(group["nesterov"])


REHEARSAL_MESH = Mesh(1, 16, 1)  # larger than any real world here, so that no cached entry could serve a rank


def warm_up() -> None:
    """Run small scenarios in this process, so that ranks forked from it inherit every lazy import and cache.

    One rank alone saves and loads; a rank of a larger world, whose collectives go nowhere, shards and steps.
    """
    base = Scenario(system="torch-fsdp2", model="frozen_tower", program="build step save build load step")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        for form in ("dcp", "full"):
            rehearse(Fsdp2Rank, replace(base, checkpoint=form), Path(folder, form))
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=REHEARSAL_MESH.world)
        for optimizer in ("adamw", "adamw/impl=fused", "sgd", "adam/impl=forloop"):
            asked = {"optimizer": optimizer, "model": "dense", "program": "build step"}
            rehearse(Fsdp2Rank, replace(base, mesh=REHEARSAL_MESH).with_axes(asked), Path(folder))
        dist.destroy_process_group()


def rehearse(kind: type[Fsdp2Rank], scenario: Scenario, folder: Path) -> None:
    """Run a scenario's operations, all sessions, on this rank alone. kind: the system's class."""
    system = kind(RankContext(scenario, model_spec(scenario.model), scenario.mesh, 0, folder))
    for op in expand(scenario):
        getattr(system, op.kind)(op)
        list(system.observe(op))
