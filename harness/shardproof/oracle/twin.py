"""The twin: the same optimizer code on whole, unsharded tensors, in one process. It says what must be.

It executes the program of its `Inputs` with the system's optimizer classes (see `steppers`), torch's LR schedule, and
the gradient clipping and loss scaler that the contract names, on logical tensors on the device of the inputs: a GPU's
kernels round otherwise than a CPU's. Gradients are the grid's exact means, so that the mesh of a scenario decides no
more than which grid a step draws from. It sees no scenario, so that one twin serves every scenario with equal inputs.

*Verifies* nothing by itself; *does not know* layouts, ranks, buckets, checkpoints or any system's index
map. A checkpoint is a deep copy of its own state. Clipping takes the total norm that the system reported
(norms of norms round by partition) and reports the exact norm beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np
import torch

from shardproof.entry import resolve
from shardproof.models import is_idle
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE
from shardproof.oracle.inputs import Build, Group, Inputs, Operation, Parameter
from shardproof.oracle.muon import WholeMuon
from shardproof.oracle.reported import NOTHING, Reported
from shardproof.oracle.scaled_adam import SCALE, ScaledAdam
from shardproof.oracle.scaler import CountedScaler
from shardproof.oracle.steppers import TORCH_DTYPE, numbers_for, optimizer_for, restore_group, restore_state, state_of
from shardproof.oracle.values import exact_gradient, initial_buffer, initial_param
from shardproof.program import LOADS, NO_CHECKPOINT, STEPS, TAKES, WRITES, seed_of_replaced
from shardproof.schedules import SCHEDULE, lines_of_schedule
from shardproof.torch_schedules import go_on_at_own_rates, shared_schedule, torch_schedule

NAME_OF = {dtype: name for name, dtype in TORCH_DTYPE.items()}
STATE_ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum", "step": "step",
               "master_param": "master"}  # fmt: skip

_new = tuple.__new__
"""Makes a named tuple without a Python call: a scenario has hundreds of keys and values."""


def run(inputs: Inputs, reported: Reported = NOTHING, *, cold_from: int | None = None) -> Logical:
    """What every observation of a scenario with these inputs must be.

    Args:
        reported: what the system said of its steps; the exact values where it said nothing.
        cold_from: gives the cold arm, from this operation on: what would be observed if no load did anything.
    """
    with torch.inference_mode():  # no gradient is taken of anything here
        return _Twin(inputs, reported, cold_from).run()


class _Model:
    """The twin's parameters, masters, buffers, optimizer, schedule and scaler after one build."""

    def __init__(self, inputs: Inputs, build: Build) -> None:
        self.inputs, self.build = inputs, build
        self.device = torch.device(inputs.device)
        self.groups = [group for group in build.groups if not group.late]
        self.due = ""  # the operation whose gradients wait for an optimizer step
        self.params = {p.fqn: self._initial(p, build.seed) for p in build.parameters}
        self.trainable = {p.fqn for p in build.parameters if p.trainable == "yes"}
        self.stepped = {p.fqn: self._master(p) for p in build.parameters}
        self.buffers = {
            b.fqn: initial_buffer(b, inputs.seed, build.seed).to(self.device, copy=True) for b in build.buffers
        }
        self.on_host = {
            self.stepped[p.fqn]: torch.tensor(list(p.host), dtype=torch.bool).reshape(p.shape)
            for p in build.parameters
            if p.host is not None
        }
        self._seen: dict[int, tuple[torch.Tensor, str, tuple[int, ...], np.ndarray[Any, Any]]] = {}
        self.optimizer = self._optimizer()
        make = partial(shared_schedule, resolve(inputs.share)) if inputs.share else torch_schedule
        self.scheduler = make(inputs.schedule, self.optimizer)
        self.scaler = self._scaler()

    def _initial(self, param: Parameter, number: int) -> torch.Tensor:
        """Its initial values in a build of a number."""
        return initial_param(param, self.inputs.seed, number).to(self.device, copy=True)

    def _master(self, param: Parameter) -> torch.Tensor:
        """The tensor the optimizer steps on: the parameter itself, or its widened master."""
        master = param.stages.master
        if master is None or not param.held or "master" in param.scaled:
            return self.params[param.fqn]
        return self.params[param.fqn].to(TORCH_DTYPE[master], copy=True)

    def _optimizer(self) -> torch.optim.Optimizer:
        groups = [self._group(group) for group in self.groups]
        domains = {
            self.stepped[p.fqn]: torch.tensor(p.domains).reshape(p.shape)
            for p in self.build.parameters
            if p.domains is not None
        }
        return optimizer_for(self.inputs.stepper_of(self.build), groups, self.on_host, domains)

    def _group(self, group: Group) -> dict[str, Any]:
        """A param group as torch.optim takes it."""
        params = [self.stepped[name] for name in group.names]
        return {"params": params, **numbers_for(self.inputs.stepper, group.hyper)}

    def unfreeze(self) -> None:
        """Make the parameters that the model marks `later` trainable."""
        self.trainable |= {p.fqn for p in self.build.parameters if p.trainable == "later"}

    def add_group(self) -> None:
        """Give the optimizer the groups that it has not had until now."""
        self.unfreeze()
        late = [group for group in self.build.groups if group.late]
        for group in late:
            self.optimizer.add_param_group(self._group(group))
        self.groups += late

    def _scaler(self) -> torch.amp.GradScaler | CountedScaler | None:
        rule = self.inputs.scale
        if rule is None:
            return None
        if not rule.torch:
            return CountedScaler(rule, self.build.scale)
        scaler = torch.amp.GradScaler(self.device.type, init_scale=self.build.scale, growth_interval=rule.window)
        scaler.scale(torch.zeros((), device=self.device))
        return scaler

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor that lasts. Where its memory is, on a CPU, is remembered: steps change it in place."""
        if tensor.is_cuda:
            return value_of(tensor)
        found = self._seen.get(id(tensor))
        if found is None:
            found = self._seen[id(tensor)] = (tensor, NAME_OF[tensor.dtype], tuple(tensor.shape), _bits(tensor))
        _, dtype, shape, bits = found
        return _new(Value, (dtype, shape, bits.tobytes()))

    def snapshot(self) -> dict[str, Any]:
        """Everything a checkpoint stores, as copies."""
        state = {fqn: self.optimizer.state.get(self.stepped[fqn], {}) for fqn in self.params}
        return {
            "params": _copied(self._stored()),
            "stepped": _copied(self.stepped),
            "buffers": _copied({b.fqn: self.buffers[b.fqn] for b in self.build.buffers if b.persistent}),
            "state": {fqn: _copied(own) for fqn, own in state.items()},
            "groups": [_copied({k: v for k, v in g.items() if k != "params"}) for g in self.optimizer.param_groups],
            "scheduler": copy.deepcopy(self.scheduler.state_dict()) if self.scheduler else None,
            "scaler": copy.deepcopy(self.scaler.state_dict()) if self.scaler else None,
        }

    def _stored(self) -> dict[str, torch.Tensor]:
        """The parameters that checkpoints have, or give values to."""
        return {f: p for f, p in self.params.items() if f in self.trainable or not self.inputs.skips_frozen}

    def restore_model(self, saved: dict[str, Any]) -> None:
        for fqn in saved["params"].keys() & self._stored().keys():
            self.params[fqn].copy_(saved["params"][fqn])
        for fqn, tensor in saved["buffers"].items():
            self.buffers[fqn].copy_(tensor)

    def restore(self, saved: dict[str, Any]) -> None:
        self.restore_model(saved)
        self.restore_optimizer(saved)
        self.restore_schedule(saved)
        if self.scaler:
            self.scaler.load_state_dict(copy.deepcopy(saved["scaler"]))

    def restore_schedule(self, saved: dict[str, Any]) -> None:
        """What the schedule keeps of its own; the rates that groups have are the optimizer's."""
        if self.scheduler and "schedule" not in self.inputs.run_keeps:
            self.scheduler.load_state_dict(copy.deepcopy(saved["scheduler"]))
            if {"lr", "initial_lr"} & set(self.inputs.run_keeps):
                go_on_at_own_rates(self.scheduler, at_once="lr" in self.inputs.run_keeps)

    def replace_params(self, number: int) -> None:
        """Give parameters the values of a build of another number; masters stay."""
        for p in self.build.parameters:
            self.params[p.fqn].copy_(self._initial(p, number))

    def restore_optimizer(self, saved: dict[str, Any]) -> None:
        """The optimizer's state, and masters with it; not the parameters that it steps on themselves."""
        for fqn in saved["stepped"].keys() & self.stepped.keys():
            if self.stepped[fqn] is not self.params[fqn]:
                self.stepped[fqn].copy_(saved["stepped"][fqn])
            self.optimizer.state.pop(self.stepped[fqn], None)
            restore_state(self.optimizer, self.stepped[fqn], self._as_stored(fqn, saved["state"][fqn]))
        for group, values in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            restore_group(group, _copied(values), self.inputs.run_keeps)

    def _as_stored(self, fqn: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a parameter's saved state in the dtypes that this build keeps it in."""
        stages, own = self.build.by_name[fqn].stages, _copied(state)
        for name in own.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
            own[name] = own[name].to(TORCH_DTYPE[stages.moment(STATE_ROLES[name])])
        return own

    def publish(self) -> None:
        """Round what was stepped into the model's parameters."""
        for param in self.build.parameters:
            stepped, own = self.stepped[param.fqn], self.params[param.fqn]
            if stepped is own or param.fqn not in self.trainable:
                continue
            if param.half_away:
                bits = (stepped.view(torch.int32) + 0x8000) >> 16
                own.copy_(bits.to(torch.int16).view(torch.bfloat16))
            else:
                own.copy_(stepped)

    def restore_masters(self, saved: dict[str, Any]) -> None:
        for fqn in saved["stepped"].keys() & self.stepped.keys():
            self.stepped[fqn].copy_(saved["stepped"][fqn])

    def reload_params(self) -> None:
        if self.inputs.masters_in_model:
            return
        for param in self.build.parameters:
            stepped, own = self.stepped[param.fqn], self.params[param.fqn]
            if stepped is not own:
                stepped.copy_(own)
            elif "master" in param.scaled and isinstance(self.optimizer, ScaledAdam):
                self.optimizer.refresh_master(stepped)


class _Twin:
    def __init__(self, inputs: Inputs, reported: Reported, cold_from: int | None) -> None:
        self.inputs, self.norms, self.directions = inputs, dict(reported.norms), dict(reported.directions)
        self.loads, self.first = cold_from is None, cold_from or 0
        self.saved: dict[int, dict[str, Any]] = {}
        self.logical: Logical = {}

    def run(self) -> Logical:
        model: _Model | None = None
        lasting: dict[tuple[str, str], Value] = {}
        for op in self.inputs.operations:
            of_step: dict[tuple[str, str], Value] = {}
            if op.kind == "build":
                model = _Model(self.inputs, self.inputs.builds[op.build])
            assert model is not None
            if op.kind in STEPS:
                of_step = self._step(model, op, lasting)
            else:
                self._other(model, op)
            if op.index + 1 < self.first:
                continue
            if op.kind not in (*TAKES, *WRITES) or not lasting:  # which change nothing
                lasting = {role_fqn: model.value(tensor) for role_fqn, tensor in _state(model, op)}
                for held in _hyperparameters(model):
                    lasting.update(held)
                lasting.update(_schedule(model))
            for (role, fqn), value in (lasting | of_step).items():
                self.logical[_new(Key, (op.index, LIVE, role, fqn))] = value
        return self.logical

    def _other(self, model: _Model, op: Operation) -> None:
        """An operation that takes no step."""
        match op.kind:
            case "build" | "finish_save":
                pass
            case kind if kind in TAKES:
                self.saved[op.checkpoint] = model.snapshot()
            case "save_kept":
                self.saved[op.checkpoint] = self.saved[NO_CHECKPOINT]
            case kind if kind in LOADS and not self.loads:
                pass
            case "load" | "recall":
                model.restore(self.saved[op.checkpoint])
            case "load_schedule_only":
                model.restore_schedule(self.saved[op.checkpoint])
            case "load_optimizer_only":
                model.restore_optimizer(self.saved[op.checkpoint])
            case "load_model_only":
                model.restore_model(self.saved[op.checkpoint])
                if self.inputs.masters_in_model:
                    model.restore_masters(self.saved[op.checkpoint])
                elif self.inputs.load_refreshes:
                    model.reload_params()
            case "replace_params":
                model.replace_params(seed_of_replaced(op.index))
            case "reload_params":
                model.reload_params()
            case "unfreeze":
                model.unfreeze()
            case "add_group":
                model.add_group()
            case other:
                raise ValueError(f"the twin has no operation {other!r}")

    def _step(
        self, model: _Model, op: Operation, before: Mapping[tuple[str, str], Value]
    ) -> dict[tuple[str, str], Value]:
        """One optimizer step or overflowing step, or a part of one; returns the records that only a step has. before:
        what lasted until then, with the parameters that the forward computes with; nothing if nobody asks."""
        if op.kind == "apply_gradients":
            model.due = ""
            return self._apply(model, op)
        seen = self._forward(model, op, before)
        model.due = op.kind if op.kind in ("accumulate", "compute_gradients") else ""
        return seen if model.due else seen | self._apply(model, op)

    def _forward(
        self, model: _Model, op: Operation, before: Mapping[tuple[str, str], Value]
    ) -> dict[tuple[str, str], Value]:
        """The forwards of an operation: what they see of the parameters, and what they count."""
        first = model.due != "accumulate"
        forwards = range(self.inputs.microbatches)[: 1 if op.kind == "accumulate" else None][0 if first else 1 :]
        seen: dict[tuple[str, str], Value] = {}
        for param in model.build.parameters if before else ():
            if any(not is_idle(param.idle, op.iteration, n) for n in forwards):
                own, dtype = model.params[param.fqn], TORCH_DTYPE[param.stages.compute]
                computed = before["param", param.names[0]] if own.dtype == dtype else value_of(own.to(dtype))
                seen.update({("compute_param", use): computed for use in param.uses})
        for buffer in model.build.buffers if first else ():
            if buffer.dtype == "int64":
                model.buffers[buffer.fqn] += 1
        return seen

    def _apply(self, model: _Model, op: Operation) -> dict[tuple[str, str], Value]:
        """The optimizer step on the gradients of all microbatches."""
        seen: dict[tuple[str, str], Value] = {}
        takes = op.kind != "overflow"
        gradients = {
            param.fqn: self._gradient(model, param, op)
            for param in model.build.parameters
            if param.fqn in model.trainable and self._has_gradient(param, op)
        }
        if isinstance(model.scaler, torch.amp.GradScaler):
            self._scale_and_unscale(model, model.scaler, op, gradients)
        if self.inputs.clip and takes:
            exact = torch.sqrt(
                sum((g.double().square().sum().cpu() for g in gradients.values()), torch.zeros((), dtype=torch.float64))
            )
            resolve(self.inputs.clip.rule.twin)(gradients, self.norms.get(op.index, exact.item()), self.inputs.clip)
            seen["norm", "total_norm"] = value_of(exact.to(TORCH_DTYPE[self.inputs.clip.norm_dtype]))
        if takes:
            seen |= {("grad", fqn): value_of(gradient) for fqn, gradient in gradients.items()}
        muon = model.optimizer if isinstance(model.optimizer, WholeMuon) else None
        if muon:
            muon.take(op.index, model.stepped, self.directions)
        self._update(model, op, gradients)
        if muon and takes:
            names = {model.stepped[fqn]: fqn for fqn in gradients}
            seen |= {("direction", names[matrix]): value_of(taken) for matrix, taken in muon.stepped_in.items()}
        return seen

    def _scale_and_unscale(
        self, model: _Model, scaler: torch.amp.GradScaler, op: Operation, gradients: dict[str, torch.Tensor]
    ) -> None:
        """Gradients as they come out of a scaled backward and torch's GradScaler, which looks for overflows."""
        scale = scaler.get_scale()
        for fqn in gradients:
            gradients[fqn] = gradients[fqn] * scale
        if op.kind == "overflow":
            first = next(gradient for gradient in gradients.values() if gradient.numel())
            first.view(-1)[0] = float("inf")
        self._hand_over(model, gradients)
        scaler.unscale_(model.optimizer)
        for fqn, gradient in gradients.items():  # a master that reads another dtype had a copy unscaled
            unscaled = model.stepped[fqn].grad
            gradients[fqn] = gradient if unscaled is None else unscaled.to(gradient.dtype)

    def _hand_over(self, model: _Model, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizer its gradients: FusedAdam as they are, if it is precision-aware, torch's in its dtype.
        There torch's scaler looks for them too."""
        for fqn, gradient in gradients.items():
            stepped = model.stepped[fqn]
            if getattr(model.optimizer, "use_decoupled_grad", False):
                stepped.decoupled_grad = gradient  # type: ignore[attr-defined]
            if not hasattr(stepped, "decoupled_grad") or isinstance(model.scaler, torch.amp.GradScaler):
                stepped.grad = gradient.to(stepped.dtype)

    def _has_gradient(self, param: Parameter, op: Operation) -> bool:
        """Whether the optimizer is given a gradient of a trainable parameter."""
        idle = param.idle and all(is_idle(param.idle, op.iteration, n) for n in range(self.inputs.microbatches))
        return param.gradient is not None and (self.inputs.zero_gradients or not idle)

    def _gradient(self, model: _Model, param: Parameter, op: Operation) -> torch.Tensor:
        """The exact mean gradient over ranks, summed over microbatches and uses."""
        assert param.gradient is not None
        forwards = tuple(n for n in range(self.inputs.microbatches) if not is_idle(param.idle, op.iteration, n))
        step = (self.inputs.seed, op.iteration, forwards)
        gradient = exact_gradient(param.uses, param.shape, param.gradient, param.stages.main_grad, step)
        return gradient.to(model.device, copy=True)

    def _update(self, model: _Model, op: Operation, gradients: Mapping[str, torch.Tensor]) -> None:
        self._hand_over(model, gradients)
        overflow = op.kind == "overflow"
        if isinstance(model.scaler, torch.amp.GradScaler):
            model.scaler.step(model.optimizer)
            model.scaler.update()
        elif model.scaler is None or not overflow:
            model.optimizer.step()
        if isinstance(model.scaler, CountedScaler):
            model.scaler.update(overflow=overflow)
        if model.scheduler and not overflow:
            model.scheduler.step()
        for stepped in model.stepped.values():  # as zero_grad does, without a profiler's record of it
            stepped.grad = None
            vars(stepped).pop("decoupled_grad", None)
        if not overflow:
            model.publish()


def _state(model: _Model, op: Operation) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Every tensor the model and optimizer hold now, as ((role, fqn), tensor)."""
    has_masters = model.inputs.has_masters(op)
    for param in model.build.parameters:
        for name in param.names:
            yield ("param", name), model.params[param.fqn]
    for fqn, buffer in model.buffers.items():
        yield ("buffer", fqn), buffer
    for param in model.build.parameters:
        fqn, stepped = param.fqn, model.stepped[param.fqn]
        if stepped is not model.params[fqn] and has_masters:
            yield ("master", fqn), stepped
        for name, value in state_of(model.optimizer, stepped):
            role = STATE_ROLES[name.removesuffix(SCALE)]
            if role == "master" and not ("master" in param.scaled and has_masters):
                continue
            yield ("quant_scale", f"{fqn}.{role}") if name.endswith(SCALE) else (role, fqn), value
        if stepped in model.on_host and model.inputs.records_host:
            yield ("host", fqn), model.on_host[stepped]
    yield from _scaler_state(model.scaler)
    if model.scheduler:
        yield ("scheduler", "last_epoch"), torch.tensor(model.scheduler.last_epoch)
        for index, lr in enumerate(model.scheduler.get_last_lr() if not model.inputs.share else ()):
            yield ("scheduler", f"last_lr.{index}"), torch.tensor(float(lr), dtype=torch.float64)


def _scaler_state(
    scaler: torch.amp.GradScaler | CountedScaler | None,
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    match scaler:
        case torch.amp.GradScaler():
            yield ("scaler", "scale"), torch.tensor(scaler.get_scale())
            yield ("scaler", "growth_tracker"), torch.tensor(scaler._get_growth_tracker())
        case CountedScaler():
            yield ("scaler", "scale"), torch.tensor(scaler.scale)
            yield ("scaler", "growth_tracker"), torch.tensor(scaler.growth)
            if scaler.hysteresis is not None:
                yield ("scaler", "hysteresis_tracker"), torch.tensor(scaler.hysteresis)


def _schedule(model: _Model) -> Iterator[tuple[tuple[str, str], Value]]:
    """The counters in the state dict of the twin's learning-rate schedule. Learning rates are recorded with the param
    groups."""
    if model.scheduler and not model.inputs.share:
        for name, line in lines_of_schedule(model.scheduler.state_dict()):
            yield (SCHEDULE, name), _new(Value, ("utf8", (len(line),), line.encode()))


def _hyperparameters(model: _Model) -> Iterator[Mapping[tuple[str, str], Value]]:
    """The numbers of each group and the names in it, or under `owner_groups` the numbers of each parameter."""
    for index, (group, made) in enumerate(zip(model.optimizer.param_groups, model.groups, strict=True)):
        numbers = [("lr", float(group["lr"])), ("weight_decay", float(group["weight_decay"]))]
        if "betas" in group:
            numbers += [("beta1", group["betas"][0]), ("beta2", group["betas"][1])]
        numbers += [(name, float(group[name])) for name in ("momentum", "nesterov", "eps") if name in group]
        yield _numbers_of(None if model.inputs.owner_groups else index, made.names, tuple(numbers))


def _copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of what a dictionary holds, tensors and plain values."""
    return {name: v.clone() if isinstance(v, torch.Tensor) else copy.copy(v) for name, v in tensors.items()}


_SAME_BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8}
"""Dtypes that numpy lacks → one of their size that it has."""


def value_of(tensor: torch.Tensor) -> Value:
    """The value of a tensor, as observations have it."""
    return Value(NAME_OF[tensor.dtype], tuple(tensor.shape), _bits(tensor).tobytes())


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bits of a tensor as numpy sees them: its own memory, if it is the CPU's, and a copy of a GPU's."""
    bits = tensor.view(_SAME_BITS[tensor.dtype]) if tensor.dtype in _SAME_BITS else tensor
    if bits.requires_grad or bits.is_cuda:
        bits = bits.detach().cpu()
    return bits.numpy()


@lru_cache(maxsize=1024)
def _numbers_of(
    index: int | None, names: tuple[str, ...], numbers: tuple[tuple[str, float], ...]
) -> Mapping[tuple[str, str], Value]:
    """What is recorded of a group of parameters: its names and numbers under its index, or the numbers alone under each
    of its parameters where there is no index. Steps change a group seldom, so that this is remembered; nobody may
    change it."""
    values: dict[tuple[str, str], Value] = {}
    owners = names if index is None else (f"group{index}",)
    if index is not None:
        text = "\n".join(names).encode()
        values["hyperparameter", f"group{index}.params"] = Value("utf8", (len(text),), text)
    for name, number in numbers:
        value = Value("fp64", (), np.float64(number).tobytes())
        values.update({("hyperparameter", f"{owner}.{name}"): value for owner in owners})
    return values
