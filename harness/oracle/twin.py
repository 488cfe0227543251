"""The twin: the same optimizer code on whole, unsharded tensors, in one process. It says what must be.

It executes the scenario's expanded program with torch.optim, torch's LR schedule, gradient clipping and
loss scaler on logical tensors. Gradients are the grid's exact means, so the mesh of a step decides only
which grid it draws from: `twin_key` names everything a twin depends on, and one twin serves every
scenario with that key.

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
from torch.optim.lr_scheduler import StepLR

from harness import probe
from harness.models import BufferSpec, ModelSpec, NamedParam, model_spec
from harness.observe.logical import Key, Logical, Value
from harness.observe.record import LIVE
from harness.oracle.contracts import Stages, stages
from harness.program import Op, expand
from harness.scenario import Scenario

TORCH_DTYPE = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
    "int64": torch.int64, "bool": torch.bool,
}  # fmt: skip
NAME_OF = {dtype: name for name, dtype in TORCH_DTYPE.items()}
STATE_ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum", "step": "step"}


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

    def __init__(self, scenario: Scenario, spec: ModelSpec, init_seed: int) -> None:
        self.scenario, self.spec = scenario, spec
        self.stages: dict[str, Stages] = {p.fqn: stages(scenario, p.spec) for p in spec.unique_params}
        self.params = {p.fqn: self._initial(p, init_seed) for p in spec.unique_params}
        self.stepped = {fqn: self._master(fqn) for fqn in self.params}
        self.trainable = {p.fqn for p in spec.unique_params if p.spec.trainable == "yes"}
        self.buffers = {fqn: _initial_buffer(fqn, b, scenario.seed, init_seed) for fqn, b in spec.buffers()}
        self.group_names = self._groups()
        self.optimizer = self._optimizer(init_seed)
        self.scheduler = StepLR(self.optimizer, 1, 0.5) if scenario.optimizer.schedule == "halve" else None
        self.scaler: torch.amp.GradScaler | None = None
        if scenario.optimizer.loss_scale:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scenario.optimizer.loss_scale, growth_interval=2)
            self.scaler.scale(torch.zeros(()))

    def _initial(self, param: NamedParam, init_seed: int) -> torch.Tensor:
        keys = probe.element_keys(param.fqn, param.spec.shape, self.scenario.seed)
        values = torch.from_numpy(probe.initial_values(keys, init_seed)).reshape(param.spec.shape)
        return values.to(TORCH_DTYPE[self.stages[param.fqn].storage])

    def _master(self, fqn: str) -> torch.Tensor:
        """The tensor the optimizer steps on: the parameter itself, or its widened master."""
        master = self.stages[fqn].master
        return self.params[fqn] if master is None else self.params[fqn].to(TORCH_DTYPE[master])

    def _groups(self) -> list[list[str]]:
        if self.scenario.optimizer.groups == "one":
            return [list(self.params)]
        return [
            [p.fqn for p in self.spec.unique_params if p.spec.group == index] for index in range(len(self.spec.groups))
        ]

    def _optimizer(self, init_seed: int) -> torch.optim.Optimizer:
        ask = self.scenario.optimizer.at_build(init_seed)
        groups: list[dict[str, Any]] = []
        for names, override in zip(self.group_names, self.spec.groups, strict=False):
            group: dict[str, Any] = {"params": [self.stepped[n] for n in names]}
            if ask.groups == "model":
                group["lr"] = ask.lr * override.lr_scale
                group["weight_decay"] = ask.weight_decay if override.weight_decay is None else override.weight_decay
            groups.append(group)
        common: dict[str, Any] = {
            "lr": ask.lr, "weight_decay": ask.weight_decay,
            "foreach": ask.impl == "foreach", "fused": ask.impl == "fused",
        }  # fmt: skip
        if ask.kind == "sgd":
            return torch.optim.SGD(groups, momentum=ask.momentum, nesterov=ask.nesterov, **common)
        cls = torch.optim.Adam if ask.kind == "adam" else torch.optim.AdamW
        return cls(groups, betas=(ask.beta1, ask.beta2), eps=ask.eps, **common)

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
            if saved["state"][fqn]:
                self.optimizer.state[self.stepped[fqn]] = saved["state"][fqn]
        for group, values in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update(values)
        if self.scheduler:
            self.scheduler.load_state_dict(saved["scheduler"])
        if self.scaler:
            self.scaler.load_state_dict(saved["scaler"])

    def reload_params(self) -> None:
        for fqn, stepped in self.stepped.items():
            if stepped is not self.params[fqn]:
                stepped.copy_(self.params[fqn])


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
                model = _Model(self.scenario, self.spec, op.init_seed)
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
                case "reload_params":
                    model.reload_params()
                case "unfreeze":
                    model.trainable |= {p.fqn for p in self.spec.unique_params if p.spec.trainable == "later"}
                case other:
                    raise ValueError(f"the twin has no operation {other!r}")
            for (role, fqn), tensor in (*_state(model), *step_roles.items()):
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
        scale = model.scaler.get_scale() if model.scaler else 1.0
        for fqn, gradient in gradients.items():
            model.stepped[fqn].grad = gradient * scale
        if op.kind == "overflow":
            first = next(p.fqn for p in self.spec.unique_params if p.fqn in gradients)
            model.stepped[first].grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
        if model.scaler:
            model.scaler.unscale_(model.optimizer)
        if self.scenario.optimizer.clip and op.kind == "step":
            seen["norm", "total_norm"] = self._clip(model, op, gradients)
        if op.kind == "step":
            for fqn in gradients:
                seen["grad", fqn] = model.stepped[fqn].grad.clone()  # type: ignore[union-attr]
        self._update(model, op)
        return seen

    def _gradient(self, model: _Model, fqn: str, op: Op) -> torch.Tensor | None:
        """The exact mean gradient over ranks, summed over microbatches and uses; None where there is no use."""
        param, st = self.spec.param(fqn), model.stages[fqn]
        uses = self.spec.uses(fqn)
        if not uses:
            return None
        count = self.scenario.microbatches
        grid = probe.choose_grid((st.accumulate, st.reduce, st.main_grad), st.compute, op.mesh.dp, count)
        units = np.zeros(param.spec.numel, np.int64)
        for use in uses:
            keys = probe.element_keys(use, param.spec.shape, self.scenario.seed)
            for microbatch in range(count):
                units += probe.mean_units(keys, op.iteration, microbatch, grid)
        exact = torch.from_numpy(units * grid.unit).reshape(param.spec.shape)
        gradient = exact.to(TORCH_DTYPE[st.main_grad])
        if not torch.equal(gradient.double(), exact):
            raise ArithmeticError(f"the grid is not exact in {st.main_grad} for {fqn}: a fault of the harness")
        return gradient

    def _clip(self, model: _Model, op: Op, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Clip by the reported norm; return the exact norm, rounded once to fp32."""
        with_grad = [model.stepped[fqn] for fqn in model.params if fqn in gradients]
        exact = torch.sqrt(
            sum((g.double().square().sum() for g in gradients.values()), torch.zeros((), dtype=torch.float64))
        )
        reported = torch.tensor(self.norms.get(op.index, exact.item()), dtype=_norm_dtype(with_grad))
        torch.nn.utils.clip_grads_with_norm_(with_grad, self.scenario.optimizer.clip, reported)
        return exact.float()

    def _update(self, model: _Model, op: Op) -> None:
        if model.scaler:
            model.scaler.step(model.optimizer)
            model.scaler.update()
        else:
            model.optimizer.step()
        if model.scheduler and op.kind == "step":
            model.scheduler.step()
        model.optimizer.zero_grad()
        for fqn, stepped in model.stepped.items():
            if stepped is not model.params[fqn] and fqn in model.trainable and op.kind == "step":
                model.params[fqn].copy_(stepped)


def _norm_dtype(params: list[torch.Tensor]) -> torch.dtype:
    """The dtype torch.nn.utils.get_total_norm returns for gradients of these parameters."""
    dtype = torch.get_default_dtype() if not params else params[0].dtype
    for param in params[1:]:
        dtype = torch.promote_types(dtype, param.dtype)
    return dtype


def _initial_buffer(fqn: str, spec: BufferSpec, seed: int, init_seed: int) -> torch.Tensor:
    keys = probe.element_keys(fqn, spec.shape, seed)
    match spec.dtype:
        case "int64":
            return torch.zeros(spec.shape, dtype=torch.int64)
        case "bool":
            return torch.from_numpy(((keys ^ np.uint64(init_seed)) & np.uint64(1)).astype(bool)).reshape(spec.shape)
        case dtype:
            values = torch.from_numpy(probe.initial_values(keys, init_seed))
            return values.reshape(spec.shape).to(TORCH_DTYPE[dtype])


def _state(model: _Model) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Every tensor the model and optimizer hold now, as ((role, fqn), tensor)."""
    for param in model.spec.params:
        yield ("param", param.fqn), model.params[param.spec.tied_to or param.fqn]
    for fqn, buffer in model.buffers.items():
        yield ("buffer", fqn), buffer
    for fqn, stepped in model.stepped.items():
        if stepped is not model.params[fqn]:
            yield ("master", fqn), stepped
        for name, value in model.optimizer.state.get(stepped, {}).items():
            if value is not None:
                yield (STATE_ROLES[name], fqn), value
    if model.scaler:
        yield ("scaler", "scale"), torch.tensor(model.scaler.get_scale())
        yield ("scaler", "growth_tracker"), torch.tensor(model.scaler._get_growth_tracker())
    if model.scheduler:
        yield ("scheduler", "last_epoch"), torch.tensor(model.scheduler.last_epoch)
        for index, lr in enumerate(model.scheduler.get_last_lr()):
            yield ("scheduler", f"last_lr.{index}"), torch.tensor(lr, dtype=torch.float64)


def _hyperparameters(model: _Model) -> dict[tuple[str, str], Value]:
    values: dict[tuple[str, str], Value] = {}
    for index, (group, names) in enumerate(zip(model.optimizer.param_groups, model.group_names, strict=True)):
        text = "\n".join(names).encode()
        values["hyperparameter", f"group{index}.params"] = Value("utf8", (len(text),), text)
        numbers = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if "betas" in group:
            numbers |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"]}
        else:
            numbers |= {"momentum": group["momentum"], "nesterov": group["nesterov"]}
        for name, number in numbers.items():
            data = np.float64(number).tobytes()
            values["hyperparameter", f"group{index}.{name}"] = Value("fp64", (), data)
    return values


def _value(tensor: torch.Tensor) -> Value:
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return Value(NAME_OF[tensor.dtype], tuple(tensor.shape), data)
