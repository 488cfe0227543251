"""A torch training loop on one rank, with a named hook wherever libraries differ.

`TorchRank` does what a training script does around a sharding library: it builds a probe model, shards it, makes a
torch optimizer, schedule and loss scaler, runs forward and backward passes of every microbatch, clips, unscales and
steps, and reads what this rank holds afterwards. A system derives its own rank class from it and overrides the hooks in
which its library differs; no system derives from another one's. The order in which `build` calls them:

    make_model → shard → held_parameters → make_optimizer (param_groups) → make_scheduler → make_scaler

and `step`: `backward` (the passes) → `between` → unscale → `clip` → `capture_gradients` → `update`; the operations
`compute_gradients` and `apply_gradients` are its two halves. Checkpoints are the system's own. For example, FSDP2's
rank overrides `shard` with calls of `fully_shard`, and `save` and `load` with distributed checkpoints; everything else
is this loop.

The process group exists already and spans the mesh. What a record's box is comes from `shardproof.layout`, never from
the library: a local tensor of another shape than its box keeps its own shape in the record, so that assembly reports
it.

*Verifies* nothing by itself. *Does not exercise*, on the CPU, streams, overlap or pinned memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.optim.lr_scheduler import LRScheduler

from shardproof.layout import Box as ShardBox
from shardproof.layout import shard_box
from shardproof.mechanisms.probe_module import (
    DTYPE_NAME,
    Box,
    Probe,
    ProbeModule,
    Slot,
    build_model,
    local_part,
    tensor_bytes,
)
from shardproof.models import NamedParam, model_spec
from shardproof.observe.numbers import numbers_of
from shardproof.observe.record import LIVE, Record, whole
from shardproof.observe.settings import SETTING, UNKNOWN, line_of, settings_of
from shardproof.oracle.inputs import LATE_LR
from shardproof.program import FORWARDS, UPDATES, Op, does, expand, seed_of_replaced
from shardproof.protocol.registry import contract_of
from shardproof.protocol.system import RankContext, RankSystem
from shardproof.scenario import Optimizer, Scenario
from shardproof.schedules import SCHEDULE, lines_of_schedule
from shardproof.torch_loop.busy import keep_busy
from shardproof.torch_loop.optimizers import made, noting_directions
from shardproof.torch_loop.streams import Streams
from shardproof.torch_schedules import torch_schedule

STATE_ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum", "step": "step"}
"""What torch.optim calls a state → its role."""


@dataclass
class TrainState:
    """What a training script holds between two steps. iteration: optimizer steps taken. streams: the generators of its
    dropout, where it keeps some."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    iteration: int = 0
    streams: Streams | None = None

    def extra(self) -> dict[str, Any]:
        """What no state dict of model or optimizer covers, as checkpoints store it beside them."""
        return {
            "iteration": self.iteration,
            **({"scheduler": self.scheduler.state_dict()} if self.scheduler else {}),
            **({"scaler": self.scaler.state_dict()} if self.scaler else {}),
            **({"rng": self.streams.state()} if self.streams else {}),
        }

    def set_extra(self, extra: dict[str, Any]) -> None:
        """Restore what `extra` gave."""
        self.iteration = extra["iteration"]
        if self.scheduler:
            self.scheduler.load_state_dict(extra["scheduler"])
        if self.scaler:
            self.scaler.load_state_dict(extra["scaler"])
        if self.streams:
            self.streams.restore(extra["rng"])


class TorchRank:
    """One rank of a torch training loop; a `RankSystem` once `save`, `load` and `load_model_only` are there.

    Attributes for hooks: `context`, `scenario`, `spec` (the model's), `contract` (the system's), `mesh` (DeviceMesh),
    `probe`; after a build `state`, and `params`: what the optimizer was given, by canonical name; during a step
    `gradients` (local pieces as the optimizer is about to see them, by name), `directions` (Muon's, alike), `norm`
    (what clipping reported) and `microbatches` (those that the next backward passes are of).
    """

    def __init__(self, context: RankContext) -> None:
        self.context, self.contract = context, context.contract
        self.scenario, self.spec = context.scenario, context.model
        self.mesh = self.make_mesh()
        self.probe = Probe(context, self.forward_box)
        self.state: TrainState
        self.params: dict[str, nn.Parameter] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.directions: dict[str, torch.Tensor] = {}
        self.norm: torch.Tensor | None = None
        self.microbatches = range(self.scenario.microbatches)

    # Operations of a program

    def build(self, op: Op) -> None:
        """Construct everything anew. A step that was begun before is forgotten."""
        self.microbatches = range(self.scenario.microbatches)
        root = self.make_model(op.init_seed)
        self.shard(root)
        self.params = self.held_parameters(root)
        optimizer = self.make_optimizer(op.init_seed)
        self.state = TrainState(root, optimizer, self.make_scheduler(optimizer), self.make_scaler(op.init_seed))

    def step(self, op: Op) -> None:
        """One optimizer step: all microbatches, unscaling, clipping, update, schedule."""
        self.compute_gradients(op)
        self.apply_gradients(op)

    def compute_gradients(self, op: Op) -> None:
        """All microbatches of a step, or those that `accumulate` has left; gradients stay where they are."""
        self.backward(op, overflow=False)

    def accumulate(self, op: Op) -> None:
        """The first microbatch of a step alone, which leaves its gradients unsynchronised."""
        self.microbatches = self.microbatches[:1]
        self.backward(op, overflow=False)
        self.microbatches = range(1, self.scenario.microbatches)

    def apply_gradients(self, op: Op) -> None:
        """The rest of a step: the optimizer's own, on the gradients that are there."""
        self.between(op)
        if self.state.scaler:
            self.state.scaler.unscale_(self.state.optimizer)
        if self.scenario.optimizer.clip:
            self.clip()
        self.capture_gradients()
        self.update()
        self.step_schedule()
        self.state.iteration += 1

    def step_schedule(self) -> None:
        """Move the learning-rate schedule one step on, where the scenario has one."""
        if self.state.scheduler:
            self.state.scheduler.step()

    def between(self, op: Op) -> None:
        """Between the backward passes and the optimizer's step: gradients are reduced, and neither unscaled nor
        clipped. Nothing happens here; it is a seam for boundary faults (`shardproof.faults.boundary.between`)."""

    def in_flight(self, finish: Callable[[], None]) -> None:
        """An asynchronous save has begun, and `finish` waits for its end: at once. It is a seam for boundary faults
        (`shardproof.faults.overlap`)."""
        finish()

    def overflow(self, op: Op) -> None:
        """A step one of whose gradients is infinite: the loss scaler must leave it out."""
        self.backward(op, overflow=True)
        if self.state.scaler:
            self.state.scaler.unscale_(self.state.optimizer)
        self.update()

    def reload_params(self, op: Op) -> None:
        """Refresh masters from the model's parameters; nothing where the optimizer steps the parameters themselves."""

    def unfreeze(self, op: Op) -> None:
        """Make the parameters that the model marks `later` trainable."""
        for named in self.spec.unique_params:
            if named.spec.trainable == "later":
                self.params[named.fqn].requires_grad_(True)

    def pretrained(self, op: Op) -> dict[str, torch.Tensor]:
        """The whole weights that a `replace_params` gives the parameters, on the CPU, by name."""
        root = build_model(self.probe, seed_of_replaced(op.index))
        return {name: p.detach() for name, p in root.named_parameters(remove_duplicate=False)}

    def add_group(self, op: Op) -> None:
        """Make them trainable, and give them to the optimizer as a group of their own."""
        late = [p.fqn for p in self.spec.unique_params if p.spec.trainable == "later"]
        self.params |= {fqn: self.state.model.get_parameter(fqn) for fqn in late}
        for fqn in late:
            self.params[fqn].requires_grad_(True)
        ask = self.contract.at_build(self.scenario, op.init_seed)
        parameters, lr = [self.params[fqn] for fqn in late], self.rate(ask.lr * LATE_LR)
        self.state.optimizer.add_param_group({"params": parameters, "lr": lr})

    def observe(self, op: Op) -> Iterable[Record]:
        """Yield records of the whole training state on this rank (roles as in `shardproof.observe.record`), without
        changing the state."""
        yield from self.model_records(op)
        yield from self.optimizer_records(op)
        yield from self.schedule_records(op)
        if op.kind in FORWARDS:
            yield from self.compute_records(op)
        if op.kind in UPDATES:
            for fqn, gradient in self.gradients.items():
                yield self.sharded(op, "grad", self.spec.param(fqn), gradient)
            for fqn, direction in self.directions.items():
                yield self.sharded(op, "direction", self.spec.param(fqn), direction)
            if self.norm is not None:
                yield self.whole(op, "norm", "total_norm", self.norm)

    # Hooks: construction

    def make_mesh(self) -> DeviceMesh:
        """The mesh of all ranks. dp_shard is always one of its dims; dp_replicate and tp are where they are larger
        than 1."""
        mesh = self.context.mesh
        sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        return init_device_mesh(self.scenario.device, tuple(kept.values()), mesh_dim_names=tuple(kept))

    def make_model(self, init_seed: int) -> nn.Module:
        """The model before it is sharded over data-parallel ranks; tensor parallelism is applied."""
        root = build_model(self.probe, init_seed).to(self.scenario.device)
        if self.context.mesh.tp > 1:
            tensor_parallel(root, self.mesh["tp"])
        return root

    def shard(self, root: nn.Module) -> None:
        """Shard the model in place, as the library does it; a loop without a library leaves it whole."""

    def held_parameters(self, root: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer is given, by canonical name."""
        wanted = {"yes"} if self.contract.trainable_only else {"yes", "no", "later"}
        if does(self.scenario, "add_group"):
            wanted -= {"later"}
        return {p.fqn: root.get_parameter(p.fqn) for p in self.spec.unique_params if p.spec.trainable in wanted}

    def make_optimizer(self, init_seed: int) -> torch.optim.Optimizer:
        """The optimizer over `param_groups`, with the hyperparameters of this build."""
        ask = self.contract.at_build(self.scenario, init_seed)
        return made(ask, self.param_groups(ask), self.rate(ask.lr))

    def rate(self, lr: float) -> float | torch.Tensor:
        """A learning rate as the optimizer is given it."""
        return torch.tensor(lr, device=self.scenario.device) if self.scenario.optimizer.tensor_lr else lr

    def param_groups(self, ask: Optimizer) -> list[dict[str, Any]]:
        """The param groups that the scenario asks for: parameters, learning rate and weight decay."""
        if ask.groups == "one":
            return [{"params": list(self.params.values())}]
        return [
            {
                "params": [
                    self.params[p.fqn]
                    for p in self.spec.unique_params
                    if p.spec.group == index and p.fqn in self.params
                ],
                "lr": self.rate(ask.lr * group.lr_scale),
                "weight_decay": ask.weight_decay if group.weight_decay is None else group.weight_decay,
            }
            for index, group in enumerate(self.spec.groups)
        ]

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        """Build the learning-rate schedule that the scenario's `optimizer` axis names; None for a constant rate."""
        return torch_schedule(self.scenario.optimizer.schedule, optimizer)

    def make_scaler(self, init_seed: int) -> torch.amp.GradScaler | None:
        """The dynamic loss scaler, if there is one."""
        scale = self.contract.at_build(self.scenario, init_seed).loss_scale
        return torch.amp.GradScaler(self.scenario.device, init_scale=scale, growth_interval=2) if scale else None

    # Hooks: one step

    def backward(self, op: Op, *, overflow: bool) -> None:
        """All microbatches' forward and backward passes; the loss of each is the forward's output."""
        self.start_step()
        root, last = self.state.model, self.scenario.microbatches - 1
        for microbatch in self.microbatches:
            self.probe.slot = Slot(op.iteration, microbatch, overflow)
            if isinstance(root, FSDPModule):
                root.set_requires_gradient_sync(self.scenario.grad_sync == "every" or microbatch == last)
            self.backward_of(root(torch.ones(1, device=self.scenario.device, requires_grad=True)).sum())
        self.microbatches = range(self.scenario.microbatches)

    def start_step(self) -> None:
        """Forget what the last step left to observe."""
        self.probe.start_step()
        self.gradients, self.directions, self.norm = {}, {}, None

    def backward_of(self, loss: torch.Tensor) -> None:
        """Run one backward pass, with the loss multiplied by the GradScaler's scale if the scenario uses a scaler."""
        (self.state.scaler.scale(loss) if self.state.scaler else loss).backward()  # type: ignore[no-untyped-call]

    def clip(self) -> None:
        """Clip the gradients by their global norm, and keep the norm that was reported."""
        ask = self.scenario.optimizer
        norm = nn.utils.clip_grad_norm_(self.params.values(), ask.clip, foreach=ask.impl == "foreach" or None)
        self.norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()

    def capture_gradients(self) -> None:
        """Copy the gradients as the optimizer is about to see them."""
        self.gradients = {
            fqn: local_part(p.grad).detach().clone() for fqn, p in self.params.items() if p.grad is not None
        }

    def update(self) -> None:
        """Step the optimizer, through the loss scaler if there is one."""
        state = self.state
        keep_busy(self.scenario.device)
        with noting_directions(state.optimizer, self.params) as self.directions:
            if state.scaler:
                state.scaler.step(state.optimizer)
                state.scaler.update()
            else:
                state.optimizer.step()
        state.optimizer.zero_grad()

    # Hooks: observation, which only reads

    def model_records(self, op: Op) -> Iterator[Record]:
        """`param` under every name, and `buffer`."""
        for named in self.spec.params:
            parameter = self.state.model.get_parameter(named.fqn)
            yield self.sharded(op, "param", named, local_part(parameter))
        for fqn, _ in self.spec.buffers():
            yield self.whole(op, "buffer", fqn, local_part(self.state.model.get_buffer(fqn)))

    def compute_records(self, op: Op) -> Iterator[Record]:
        """Records of role `compute_param`: parameters as the forward passes of the step used them. A parameter used on
        other ranks only gets an empty record."""
        for fqn, kept in self.probe.seen.items():
            start, _ = self.forward_box(fqn)
            shape = self.spec.param(fqn).spec.shape
            for seen in kept:
                at = (op.index, self.context.rank, LIVE, "compute_param", fqn)
                yield Record(*at, seen.dtype, shape, start, seen.size, seen.data)
        for named in self.spec.params:
            if named.spec.idle == "others" and named.fqn not in self.probe.seen:
                at = (op.index, self.context.rank, LIVE, "compute_param", named.fqn)
                dtype = self.probe.parameters[named.fqn].stages.compute
                yield Record(*at, dtype, named.spec.shape, (named.spec.numel,), (0,), b"", flat=True)

    def optimizer_records(self, op: Op) -> Iterator[Record]:
        """The optimizer's state of every parameter, and `hyperparameter`."""
        states = self.state.optimizer.state
        for fqn, parameter in self.params.items():
            yield from self.state_records(op, fqn, parameter, states.get(parameter, {}))
        names = {id(parameter): fqn for fqn, parameter in self.params.items()}
        for index, group in enumerate(self.state.optimizer.param_groups):
            text = "\n".join(names.get(id(p), "?") for p in group["params"]).encode()
            key = f"group{index}"
            yield whole(op.index, self.context.rank, "hyperparameter", f"{key}.params", "utf8", (len(text),), text)
            for name, number in numbers_of(group):
                yield self.number(op, "hyperparameter", f"{key}.{name}", number)
            for name, line in settings_of(group):
                text = line.encode()
                yield whole(op.index, self.context.rank, SETTING, f"{key}.{name}", "utf8", (len(text),), text)

    def state_records(self, op: Op, fqn: str, parameter: nn.Parameter, state: dict[str, Any]) -> Iterator[Record]:
        """Records of the optimizer state of one parameter, such as `exp_avg` and `step`."""
        for name, value in state.items():
            if value is None:
                continue
            if name not in STATE_ROLES:
                yield self.unknown(op, f"{fqn}.{name}", value)
                continue
            role, tensor = STATE_ROLES[name], as_state(value)
            if tensor is None:
                continue
            if isinstance(tensor, DTensor) and tensor.dim():
                yield self.sharded(op, role, self.spec.param(fqn), tensor.to_local())
            else:
                yield self.whole(op, role, fqn, local_part(tensor))

    def unknown(self, op: Op, name: str, value: Any) -> Record:
        """`unknown`: state under a name that no optimizer of ours gives it. Nothing is expected there, so that it is a
        difference and no error of ours."""
        text = line_of(value).encode()
        return whole(op.index, self.context.rank, UNKNOWN, name, "utf8", (len(text),), text)

    def schedule_records(self, op: Op) -> Iterator[Record]:
        """`scheduler` and `scaler`."""
        if self.state.scheduler:
            yield self.integer(op, "scheduler", "last_epoch", self.state.scheduler.last_epoch)
            for index, lr in enumerate(self.state.scheduler.get_last_lr()):
                yield self.number(op, "scheduler", f"last_lr.{index}", float(lr))
            for name, line in lines_of_schedule(self.state.scheduler.state_dict()):
                yield self.text(op, SCHEDULE, name, line)
        if self.state.scaler:
            saved = self.state.scaler.state_dict()
            yield self.whole(op, "scaler", "scale", torch.tensor(saved["scale"], dtype=torch.float32))
            yield self.integer(op, "scaler", "growth_tracker", saved["_growth_tracker"])

    def own_box(self, named: NamedParam) -> ShardBox:
        """Where this rank's shard of a parameter lies: dim 0 in torch.chunk order, inside the tensor-parallel shard."""
        mesh, rank = self.context.mesh, self.context.rank
        sizes = (mesh.dp_replicate, mesh.dp_shard, mesh.tp)
        return shard_box(named.spec.shape, sizes, mesh.coordinate(rank), self.tp_dim(named))

    def forward_box(self, fqn: str) -> Box:
        """What a forward computes with: the tensor-parallel shard, gathered over data-parallel ranks."""
        named, mesh = self.spec.param(fqn), self.context.mesh
        tp_index = mesh.coordinate(self.context.rank)[2]
        box = shard_box(named.spec.shape, (1, 1, mesh.tp), (0, 0, tp_index), self.tp_dim(named))
        return box.start, box.size

    # For hooks to use

    def tp_dim(self, named: NamedParam) -> int | None:
        """The dim that tensor parallelism cuts on this mesh."""
        return named.spec.tp_dim if self.context.mesh.tp > 1 else None

    def sharded(self, op: Op, role: str, named: NamedParam, local: torch.Tensor) -> Record:
        """A record of this rank's shard. Where its box starts is our arithmetic, how large it is the library's
        tensor says."""
        return Record(
            op.index, self.context.rank, LIVE, role, named.fqn, DTYPE_NAME[local.dtype], named.spec.shape,
            self.own_box(named).start, tuple(local.shape), tensor_bytes(local),
        )  # fmt: skip

    def whole(self, op: Op, role: str, fqn: str, tensor: torch.Tensor) -> Record:
        """A record of a tensor that this rank holds whole."""
        name, shape = DTYPE_NAME[tensor.dtype], tuple(tensor.shape)
        return whole(op.index, self.context.rank, role, fqn, name, shape, tensor_bytes(tensor))

    def number(self, op: Op, role: str, fqn: str, number: float) -> Record:
        """A record of a python float: fp64, shape ()."""
        return whole(op.index, self.context.rank, role, fqn, "fp64", (), struct.pack("<d", number))

    def integer(self, op: Op, role: str, fqn: str, number: int) -> Record:
        """A record of an integer: int64, shape ()."""
        return whole(op.index, self.context.rank, role, fqn, "int64", (), struct.pack("<q", number))

    def text(self, op: Op, role: str, fqn: str, text: str) -> Record:
        """A record of a text: utf8, shape (bytes,)."""
        data = text.encode()
        return whole(op.index, self.context.rank, role, fqn, "utf8", (len(data),), data)


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


def as_state(value: Any) -> torch.Tensor | None:
    """What an optimizer keeps as a tensor; None where a load put something there that is no number: it is missing."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def context_of(scenario: Scenario, folder: Path) -> RankContext:
    """What the only rank of a scenario knows; for warm-ups, which run a scenario in the server itself."""
    return RankContext(scenario, model_spec(scenario.model), scenario.mesh, 0, folder, contract_of(scenario))


def rehearse(system: RankSystem, scenario: Scenario) -> None:
    """Run a scenario's operations, all sessions, on a rank alone, in this process."""
    for op in expand(scenario):
        getattr(system, op.kind)(op)
        list(system.observe(op))
