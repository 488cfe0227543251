"""The twin: the same optimizer code on whole, unsharded tensors, in one process. It says what must be.

It executes the scenario's expanded program with the system's optimizer classes (see `steppers`), torch's LR schedule,
and the gradient clipping and loss scaler of the system's rules, on logical tensors on the scenario's device: a GPU's
kernels round otherwise than a CPU's. Gradients are the grid's exact means, so the mesh decides only which grid a step
draws from, and where part of the elements is offloaded to a kernel of its own, which: `judge.twin_axes` keeps what a
twin depends on, and one twin serves every scenario that shares it.

*Verifies* nothing by itself; *does not know* layouts, ranks, buckets, checkpoints or any system's index
map. A checkpoint is a deep copy of its own state. Clipping takes the total norm that the system reported
(norms of norms round by partition) and reports the exact norm beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from harness import probe
from harness.models import BufferSpec, ModelSpec, ModuleSpec, NamedParam, model_spec
from harness.observe.logical import Key, Logical, Value
from harness.observe.record import LIVE
from harness.oracle.contracts import (
    Stages,
    at_build,
    buffer_dtype,
    gradient_grid,
    has_masters,
    has_scaler,
    initial_bound,
    initial_dtypes,
    linear_share,
    masters_in_model,
    on_mesh,
    rounds_half_away,
    rules,
    scaled_roles,
    stages,
    twin_device,
)
from harness.oracle.domains import scale_domains
from harness.oracle.host_elements import host_elements, knows_host
from harness.oracle.scaled_adam import SCALE, ScaledAdam
from harness.oracle.scaler import MegatronScaler
from harness.oracle.steppers import TORCH_DTYPE, optimizer_for, restore_state, state_of
from harness.program import Op, expand
from harness.scenario import Scenario

NAME_OF = {dtype: name for name, dtype in TORCH_DTYPE.items()}
STATE_ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum", "step": "step",
               "master_param": "master"}  # fmt: skip


def run(scenario: Scenario, norms: Mapping[int, float] | None = None, *, loads: bool = True) -> Logical:
    """What every observation of `scenario` must be.

    Args:
        scenario: any system's scenario; its mesh matters only through the grid.
        norms: op index → total gradient norm the system reported for that step; the exact one where it is missing.
        loads: False gives the cold arm: what would be observed if no load did anything.
    """
    return _Twin(scenario, norms or {}, loads).run()


class _Model:
    """The twin's parameters, masters, buffers, optimizer, schedule and scaler after one build."""

    def __init__(self, scenario: Scenario, spec: ModelSpec, op: Op) -> None:
        scenario = on_mesh(scenario, op.mesh)
        self.scenario, self.spec, self.rules = scenario, spec, rules(scenario.system)
        self.device = torch.device(twin_device(scenario))
        self.stages: dict[str, Stages] = {p.fqn: stages(scenario, p.spec) for p in spec.unique_params}
        self.scaled = {fqn: scaled_roles(scenario, stage) for fqn, stage in self.stages.items()}
        self.params = {p.fqn: self._initial(p, op.init_seed) for p in spec.unique_params}
        self.trainable = {p.fqn for p in spec.unique_params if p.spec.trainable == "yes"}
        self.held = [fqn for fqn in self.params if fqn in self.trainable or not self.rules.trainable_only]
        self.stepped = {fqn: self._master(fqn) for fqn in self.params}
        self.buffers = {
            f"{m.path}.{b.name}": _initial_buffer(f"{m.path}.{b.name}", b, m, scenario, op.init_seed).to(self.device)
            for m in spec.modules
            for b in m.buffers
        }
        masks = host_elements(scenario, op.mesh)
        self.on_host = {self.stepped[fqn]: torch.from_numpy(mask) for fqn, mask in masks.items()}
        self.group_names = self._groups()
        self.optimizer = self._optimizer(op)
        self.scheduler = self._schedule()
        self.scaler = self._scaler()

    def _initial(self, param: NamedParam, init_seed: int) -> torch.Tensor:
        keys = probe.element_keys(param.fqn, param.spec.shape, self.scenario.seed)
        values = torch.from_numpy(probe.initial_values(keys, init_seed)).reshape(param.spec.shape)
        bound = initial_bound(self.scenario, param.spec)
        values = values.clamp(-bound, bound)
        for dtype in initial_dtypes(self.scenario, param.spec):
            values = values.to(TORCH_DTYPE[dtype])
        return values.to(self.device)

    def _master(self, fqn: str) -> torch.Tensor:
        """The tensor the optimizer steps on: the parameter itself, or its widened master."""
        master = self.stages[fqn].master
        separate = master is not None and fqn in self.held and "master" not in self.scaled[fqn]
        return self.params[fqn].to(TORCH_DTYPE[str(master)]) if separate else self.params[fqn]

    def _groups(self) -> list[list[str]]:
        if self.scenario.optimizer.groups == "one":
            return [list(self.held)]
        return [
            [p.fqn for p in self.spec.unique_params if p.spec.group == index and p.fqn in self.held]
            for index in range(len(self.spec.groups))
        ]

    def _optimizer(self, op: Op) -> torch.optim.Optimizer:
        ask = at_build(self.scenario, op.init_seed)
        groups: list[dict[str, Any]] = []
        for names, override in zip(self.group_names, self.spec.groups, strict=False):
            group: dict[str, Any] = {"params": [self.stepped[n] for n in names]}
            if ask.groups == "model":
                group["lr"] = ask.lr * override.lr_scale
                group["weight_decay"] = ask.weight_decay if override.weight_decay is None else override.weight_decay
            groups.append(group)
        domains = scale_domains(self.scenario, op.mesh)
        numbered = {self.stepped[fqn]: torch.from_numpy(numbers) for fqn, numbers in domains.items()}
        return optimizer_for(self.scenario, ask, groups, self.on_host, numbered)

    def _schedule(self) -> LRScheduler | None:
        match self.scenario.optimizer.schedule:
            case "halve":
                return StepLR(self.optimizer, 1, 0.5)
            case "linear":
                return LambdaLR(self.optimizer, linear_share)
        return None

    def _scaler(self) -> torch.amp.GradScaler | MegatronScaler | None:
        if not has_scaler(self.scenario):
            return None
        initial = self.scenario.optimizer.loss_scale
        if self.rules.loss_scale == "megatron":
            return MegatronScaler(initial)
        scaler = torch.amp.GradScaler(self.device.type, init_scale=initial, growth_interval=2)
        scaler.scale(torch.zeros((), device=self.device))
        return scaler

    def snapshot(self) -> dict[str, Any]:
        """Everything a checkpoint stores, deep-copied."""
        return copy.deepcopy(
            {
                "params": self.params,
                "stepped": self.stepped,
                "buffers": {fqn: self.buffers[fqn] for fqn, b in self.spec.buffers() if b.persistent},
                "state": {fqn: self.optimizer.state.get(self.stepped[fqn], {}) for fqn in self.params},
                "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
                "scheduler": self.scheduler.state_dict() if self.scheduler else None,
                "scaler": self.scaler.state_dict() if self.scaler else None,
            }
        )

    def restore_model(self, saved: dict[str, Any]) -> None:
        for fqn, tensor in saved["params"].items():
            self.params[fqn].copy_(tensor)
        for fqn, tensor in saved["buffers"].items():
            self.buffers[fqn].copy_(tensor)

    def restore(self, saved: dict[str, Any]) -> None:
        saved = copy.deepcopy(saved)
        self.restore_model(saved)
        for fqn, tensor in saved["stepped"].items():
            self.stepped[fqn].copy_(tensor)
            self.optimizer.state.pop(self.stepped[fqn], None)
            restore_state(self.optimizer, self.stepped[fqn], saved["state"][fqn])
        for group, values in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            for name in group.keys() - values.keys() - {"params"}:
                del group[name]  # what a first step adds
            group.update(values)
        if self.scheduler:
            self.scheduler.load_state_dict(saved["scheduler"])
        if self.scaler:
            self.scaler.load_state_dict(saved["scaler"])

    def publish(self) -> None:
        """Round what was stepped into the model's parameters."""
        for fqn, stepped in self.stepped.items():
            if stepped is self.params[fqn] or fqn not in self.trainable:
                continue
            if rounds_half_away(self.scenario, self.stages[fqn]):
                bits = (stepped.view(torch.int32) + 0x8000) >> 16
                self.params[fqn].copy_(bits.to(torch.int16).view(torch.bfloat16))
            else:
                self.params[fqn].copy_(stepped)

    def restore_masters(self, saved: dict[str, Any]) -> None:
        for fqn, tensor in saved["stepped"].items():
            self.stepped[fqn].copy_(tensor)

    def reload_params(self) -> None:
        if masters_in_model(self.scenario):
            return
        for fqn, stepped in self.stepped.items():
            if stepped is not self.params[fqn]:
                stepped.copy_(self.params[fqn])
            elif "master" in self.scaled[fqn] and isinstance(self.optimizer, ScaledAdam):
                self.optimizer.refresh_master(stepped)


class _Twin:
    def __init__(self, scenario: Scenario, norms: Mapping[int, float], loads: bool) -> None:
        self.scenario, self.norms, self.loads = scenario, norms, loads
        self.spec = model_spec(scenario.model)
        self.saved: dict[int, dict[str, Any]] = {}
        self.logical: Logical = {}

    def run(self) -> Logical:
        model: _Model | None = None
        for op in expand(self.scenario):
            step_roles: dict[tuple[str, str], torch.Tensor] = {}
            if op.kind == "build":
                model = _Model(self.scenario, self.spec, op)
            assert model is not None
            match op.kind:
                case "build":
                    pass
                case "step" | "overflow":
                    step_roles = self._step(model, op)
                case "save":
                    self.saved[op.checkpoint] = model.snapshot()
                case "load" | "load_model_only" if not self.loads:
                    pass
                case "load":
                    model.restore(self.saved[op.checkpoint])
                case "load_model_only":
                    model.restore_model(self.saved[op.checkpoint])
                    if masters_in_model(self.scenario):
                        model.restore_masters(self.saved[op.checkpoint])
                    elif model.rules.load_refreshes:
                        model.reload_params()
                case "reload_params":
                    model.reload_params()
                case "unfreeze":
                    model.trainable |= {p.fqn for p in self.spec.unique_params if p.spec.trainable == "later"}
                case other:
                    raise ValueError(f"the twin has no operation {other!r}")
            for (role, fqn), tensor in (*_state(model, op), *step_roles.items()):
                self.logical[Key(op.index, LIVE, role, fqn)] = _value(tensor)
            for role_fqn, value in _hyperparameters(model).items():
                self.logical[Key(op.index, LIVE, *role_fqn)] = value
        return self.logical

    def _step(self, model: _Model, op: Op) -> dict[tuple[str, str], torch.Tensor]:
        """One optimizer step or overflowing step; returns the records that only a step has."""
        seen: dict[tuple[str, str], torch.Tensor] = {}
        for fqn in model.params:
            for use in self.spec.uses(fqn):
                seen["compute_param", use] = model.params[fqn].to(TORCH_DTYPE[model.stages[fqn].compute], copy=True)
        for fqn, spec in self.spec.buffers():
            if spec.dtype == "int64":
                model.buffers[fqn] += 1
        gradients = {fqn: g for fqn in model.trainable if (g := self._gradient(model, fqn, op)) is not None}
        if model.rules.loss_scale == "torch":
            self._scale_and_unscale(model, op, gradients)
        if self.scenario.optimizer.clip and op.kind == "step":
            clip = _clip_as_torch if model.rules.clip == "torch" else _clip_as_megatron
            exact = torch.sqrt(
                sum((g.double().square().sum().cpu() for g in gradients.values()), torch.zeros((), dtype=torch.float64))
            )
            clip(gradients, self.scenario.optimizer.clip, self.norms.get(op.index, exact.item()))
            seen["norm", "total_norm"] = exact.to(TORCH_DTYPE[model.rules.norm_dtype])
        if op.kind == "step":
            seen |= {("grad", fqn): gradient.clone() for fqn, gradient in gradients.items()}
        self._update(model, op, gradients)
        return seen

    def _scale_and_unscale(self, model: _Model, op: Op, gradients: dict[str, torch.Tensor]) -> None:
        """Gradients as they come out of a scaled backward and torch's GradScaler, which looks for overflows."""
        scale = model.scaler.get_scale() if isinstance(model.scaler, torch.amp.GradScaler) else 1.0
        for fqn in gradients:
            gradients[fqn] = gradients[fqn] * scale
        if op.kind == "overflow":
            first = next(p.fqn for p in self.spec.unique_params if p.fqn in gradients)
            gradients[first].view(-1)[0] = float("inf")
        if isinstance(model.scaler, torch.amp.GradScaler):
            self._hand_over(model, gradients)
            model.scaler.unscale_(model.optimizer)
            for fqn, gradient in gradients.items():  # where a master reads it in another dtype, a copy was unscaled
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

    def _gradient(self, model: _Model, fqn: str, op: Op) -> torch.Tensor | None:
        """The exact mean gradient over ranks, summed over microbatches and uses; None where there is no gradient."""
        param, st = self.spec.param(fqn), model.stages[fqn]
        uses = self.spec.uses(fqn)
        if not uses and not model.rules.zero_gradients:
            return None
        count = self.scenario.microbatches
        grid = gradient_grid(model.scenario, param.spec, op.mesh.dp)
        units = np.zeros(param.spec.numel, np.int64)
        for use in uses:
            keys = probe.element_keys(use, param.spec.shape, self.scenario.seed)
            for microbatch in range(count):
                units += probe.mean_units(keys, op.iteration, microbatch, grid)
        exact = torch.from_numpy(units * grid.unit).reshape(param.spec.shape)
        gradient = exact.to(TORCH_DTYPE[st.main_grad])
        if not torch.equal(gradient.double(), exact):
            raise ArithmeticError(f"the grid is not exact in {st.main_grad} for {fqn}: a fault of the harness")
        return gradient.to(model.device)

    def _update(self, model: _Model, op: Op, gradients: Mapping[str, torch.Tensor]) -> None:
        self._hand_over(model, gradients)
        overflow = op.kind == "overflow"
        if isinstance(model.scaler, torch.amp.GradScaler):
            model.scaler.step(model.optimizer)
            model.scaler.update()
        elif model.scaler is None or not overflow:
            model.optimizer.step()
        if isinstance(model.scaler, MegatronScaler):
            model.scaler.update(overflow=overflow)
        if model.scheduler and not overflow:
            model.scheduler.step()
        model.optimizer.zero_grad()
        if not overflow:
            model.publish()


def _clip_as_torch(gradients: dict[str, torch.Tensor], bound: float, norm: float) -> None:
    """torch.nn.utils.clip_grad_norm_, given the total norm."""
    params = []
    for gradient in gradients.values():
        param = torch.empty_like(gradient)
        param.grad = gradient
        params.append(param)
    device = params[0].device if params else None
    torch.nn.utils.clip_grads_with_norm_(params, bound, torch.tensor(norm, dtype=_norm_dtype(params), device=device))


def _clip_as_megatron(gradients: dict[str, torch.Tensor], bound: float, norm: float) -> None:
    """Multiply in fp32 by a coefficient computed in double precision, if that is below 1."""
    coefficient = bound / (norm + 1e-6)
    if coefficient < 1.0:
        for fqn, gradient in gradients.items():
            scaled = gradient.float() * torch.tensor(coefficient, dtype=torch.float32)
            gradients[fqn] = scaled.to(gradient.dtype)


def _norm_dtype(params: list[torch.Tensor]) -> torch.dtype:
    """The dtype torch.nn.utils.get_total_norm returns for gradients of these parameters."""
    dtype = torch.get_default_dtype() if not params else params[0].dtype
    for param in params[1:]:
        dtype = torch.promote_types(dtype, param.dtype)
    return dtype


def _initial_buffer(fqn: str, spec: BufferSpec, module: ModuleSpec, scenario: Scenario, init_seed: int) -> torch.Tensor:
    keys = probe.element_keys(fqn, spec.shape, scenario.seed)
    match buffer_dtype(scenario, spec.dtype, module):
        case "int64":
            return torch.zeros(spec.shape, dtype=torch.int64)
        case "bool":
            return torch.from_numpy(((keys ^ np.uint64(init_seed)) & np.uint64(1)).astype(bool)).reshape(spec.shape)
        case dtype:
            values = torch.from_numpy(probe.initial_values(keys, init_seed))
            return values.reshape(spec.shape).to(TORCH_DTYPE[dtype])


def _state(model: _Model, op: Op) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Every tensor the model and optimizer hold now, as ((role, fqn), tensor)."""
    for param in model.spec.params:
        yield ("param", param.fqn), model.params[param.spec.tied_to or param.fqn]
    for fqn, buffer in model.buffers.items():
        yield ("buffer", fqn), buffer
    for fqn, stepped in model.stepped.items():
        if stepped is not model.params[fqn] and has_masters(model.scenario, op):
            yield ("master", fqn), stepped
        for name, value in state_of(model.optimizer, stepped):
            role = STATE_ROLES[name.removesuffix(SCALE)]
            if role == "master" and not ("master" in model.scaled[fqn] and has_masters(model.scenario, op)):
                continue
            yield ("quant_scale", f"{fqn}.{role}") if name.endswith(SCALE) else (role, fqn), value
        if stepped in model.on_host and knows_host(model.scenario):
            yield ("host", fqn), model.on_host[stepped]
    yield from _scaler_state(model.scaler)
    if model.scheduler:
        yield ("scheduler", "last_epoch"), torch.tensor(model.scheduler.last_epoch)
        for index, lr in enumerate(model.scheduler.get_last_lr() if model.rules.last_lr else ()):
            yield ("scheduler", f"last_lr.{index}"), torch.tensor(lr, dtype=torch.float64)


def _scaler_state(
    scaler: torch.amp.GradScaler | MegatronScaler | None,
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    match scaler:
        case torch.amp.GradScaler():
            yield ("scaler", "scale"), torch.tensor(scaler.get_scale())
            yield ("scaler", "growth_tracker"), torch.tensor(scaler._get_growth_tracker())
        case MegatronScaler():
            yield ("scaler", "scale"), torch.tensor(scaler.scale)
            yield ("scaler", "growth_tracker"), torch.tensor(scaler.growth)
            yield ("scaler", "hysteresis_tracker"), torch.tensor(scaler.hysteresis)


def _hyperparameters(model: _Model) -> dict[tuple[str, str], Value]:
    """The numbers of each group and the names in it, or under `owner_groups` the numbers of each parameter."""
    values: dict[tuple[str, str], Value] = {}
    for index, (group, names) in enumerate(zip(model.optimizer.param_groups, model.group_names, strict=True)):
        owners = names if model.rules.owner_groups else [f"group{index}"]
        if not model.rules.owner_groups:
            text = "\n".join(names).encode()
            values["hyperparameter", f"group{index}.params"] = Value("utf8", (len(text),), text)
        numbers = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if "betas" in group:
            numbers |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"]}
        else:
            numbers |= {"momentum": group["momentum"], "nesterov": group["nesterov"]}
        for owner in owners:
            for name, number in numbers.items():
                values["hyperparameter", f"{owner}.{name}"] = Value("fp64", (), np.float64(number).tobytes())
    return values


def _value(tensor: torch.Tensor) -> Value:
    tensor = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return Value(NAME_OF[tensor.dtype], tuple(tensor.shape), data)
