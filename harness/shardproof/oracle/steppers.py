"""The optimizers that the twin steps with: the very classes that systems use, on whole tensors.

These are torch.optim's for torch's implementations, and the emulated FusedAdam and FusedSGD for `multi_tensor`. Where
CPU offload leaves part of the elements to another kernel, both kernels step, and each element takes the result of the
one that the contract names for it (`Hybrid`). Where state is scaled, it is `ScaledAdam`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch

from shardproof.emulation.device import fused_optimizers
from shardproof.entry import resolve
from shardproof.oracle.inputs import Hyper, PreciseState, Stepper

TORCH_DTYPE = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
    "int64": torch.int64, "bool": torch.bool, "fp8e4m3": torch.float8_e4m3fn,
}  # fmt: skip

MOMENT_DTYPE = TORCH_DTYPE | {"fp8e4m3": torch.uint8}
"""The dtypes that FusedAdam is asked for; fp8 is uint8 there."""

MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_for(
    stepper: Stepper,
    groups: list[dict[str, Any]],
    on_host: dict[torch.Tensor, torch.Tensor],
    domains: dict[torch.Tensor, torch.Tensor],
) -> torch.optim.Optimizer:
    """The optimizer that a stepper describes.

    Args:
        groups: torch's param groups, with every number of the optimizer's kind in them.
        on_host: of every tensor, which elements are stepped on the host (bool, its shape). Read only where the kernels
            of host and device differ.
        domains: of every tensor, the number of each element's domain (int64, its shape); empty where nothing is scaled.
    """
    if stepper.make:
        made: torch.optim.Optimizer = resolve(stepper.make)(stepper, groups)
        return made
    if stepper.kind == "muon":
        from shardproof.oracle.muon import WholeMuon

        return WholeMuon(groups)
    if stepper.mixed:
        return Hybrid(groups, stepper, on_host)
    if stepper.precise:
        return _precise(stepper, stepper.precise, groups, domains)
    return _optimizer(stepper.kind, stepper.impl, stepper.device, groups, capturable=stepper.capturable)


def numbers_for(stepper: Stepper, hyper: Hyper) -> dict[str, Any]:
    """The numbers of a param group, under torch.optim's names."""
    lr = torch.tensor(hyper.lr) if stepper.tensor_lr else hyper.lr
    numbers: dict[str, Any] = {"lr": lr, "weight_decay": hyper.weight_decay}
    if stepper.kind == "muon":
        return numbers | {"momentum": hyper.momentum, "nesterov": hyper.nesterov, "eps": hyper.eps}
    if stepper.kind == "sgd":
        return numbers | {"momentum": hyper.momentum, "nesterov": hyper.nesterov}
    return numbers | {"betas": (hyper.beta1, hyper.beta2), "eps": hyper.eps}


def _optimizer(
    kind: str, impl: str, device: str, groups: list[dict[str, Any]], *, capturable: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of one kind and implementation. Every number is in the groups, so that an optimizer's defaults
    say nothing."""
    if impl == "multi_tensor":
        fused_adam, fused_sgd = fused_optimizers(device, precision_aware=False)
        if kind == "sgd":
            return fused_sgd(groups, **_defaults(groups))
        return fused_adam(groups, adam_w_mode=kind == "adamw", **_defaults(groups))
    ways: dict[str, Any] = {"foreach": impl == "foreach", "fused": impl == "fused"}
    if kind == "sgd":
        return _bare(torch.optim.SGD(groups, **_defaults(groups), **ways))
    cls = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return _bare(cls(groups, **_defaults(groups), **ways, capturable=capturable))


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of torch whose `step` is the function that computes, without what torch wraps around it: that looks
    for hooks, tells a profiler, breaks a compiler's graph, and takes a third of a step of tensors as small as ours. The
    twin steps under `inference_mode`, so that no gradient has to be switched off either."""
    optimizer.step = MethodType(inspect.unwrap(type(optimizer).step), optimizer)  # type: ignore[method-assign]
    return optimizer


def _never_compiled(method: Any) -> None:
    """Tell torch that a method which its compiler has to leave alone needs no compiler to be told so.

    torch would import the compiler for it, and with it DTensor: 1.5 seconds, at the start of every run.
    """
    computes = inspect.unwrap(method)
    if computes is not method:
        vars(computes).setdefault("__dynamo_disable", computes)


_never_compiled(torch.optim.Optimizer.add_param_group)


def _defaults(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Defaults for an optimizer's constructor, which checks them against each other (nesterov needs momentum): the
    first group's numbers."""
    return {name: value for name, value in groups[0].items() if name != "params"}


def _precise(
    stepper: Stepper, state: PreciseState, groups: list[dict[str, Any]], domains: dict[torch.Tensor, torch.Tensor]
) -> torch.optim.Optimizer:
    """FusedAdam with moments in dtypes of its own. It reads `decoupled_grad`, which may be narrower than its tensor.

    Masters that the contract keeps apart are stepped as if they were parameters; those that are a part of FusedAdam's
    state are its own.
    """
    from shardproof.oracle.scaled_adam import ScaledAdam

    options: dict[str, Any] = {
        **_defaults(groups),
        "adam_w_mode": stepper.kind == "adamw",
        "exp_avg_dtype": MOMENT_DTYPE[state.exp_avg],
        "exp_avg_sq_dtype": MOMENT_DTYPE[state.exp_avg_sq],
    }
    if not domains:
        fused_adam, _ = fused_optimizers(stepper.device, precision_aware=True)
        return fused_adam(groups, use_decoupled_grad=True, **options)
    masters = {"master_weights": True, "master_weight_dtype": TORCH_DTYPE[state.master]} if state.master else {}
    return ScaledAdam(groups, options | masters, domains)


class Hybrid(torch.optim.Optimizer):
    """Adam of two kernels: every tensor is stepped by both, and each element takes the result of the one it lies with.

    Tensors and state lie on the host; each kernel steps copies on its own device. State is torch's: `exp_avg`,
    `exp_avg_sq` and `step`, a scalar, of each tensor.

    Args:
        on_host: of every tensor, which elements the host's kernel steps.
    """

    def __init__(
        self, groups: list[dict[str, Any]], stepper: Stepper, on_host: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        super().__init__(groups, _defaults(groups))
        self.stepper, self.on_host = stepper, on_host

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every tensor that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(group, param)

    def _step(self, group: dict[str, Any], param: torch.Tensor) -> None:
        kernels = ((self.stepper.impl, self.stepper.device), (self.stepper.host_impl, "cpu"))
        results = [self._stepped(*kernel, group, param) for kernel in kernels]
        state = self.state[param]
        for name in MOMENTS:
            device, host = (result[name] for result in results)
            state[name] = torch.where(self.on_host[param], host, device)
        param.copy_(torch.where(self.on_host[param], results[1]["param"], results[0]["param"]))
        state["step"] = torch.tensor(float(state["step"]) + 1 if "step" in state else 1.0)

    def _stepped(self, impl: str, device: str, group: dict[str, Any], param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run one kernel, host or device, on a copy of a tensor with its moments, and return the updated tensors by
        name."""
        assert param.grad is not None
        copy = param.detach().to(device, copy=True)
        copy.grad = param.grad.to(device, copy=True)
        hyper = {name: group[name] for name in self.defaults}  # a schedule adds keys that no optimizer takes
        optimizer = _optimizer(self.stepper.kind, impl, device, [{**hyper, "params": [copy]}])
        if self.state[param]:
            own = {name: value.to(device, copy=True) for name, value in self.state[param].items() if name != "step"}
            own["step"] = self.state[param]["step"].to(device if impl == "fused" else "cpu", copy=True)
            if impl == "multi_tensor":
                optimizer.param_groups[0]["step"] = int(own.pop("step"))
            optimizer.state[copy] = own
        optimizer.step()
        return {"param": copy.cpu(), **{name: optimizer.state[copy][name].cpu() for name in MOMENTS}}


def state_of(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """`(name, value)` of a tensor's state; `step` as a scalar of its own, also where the group counts it."""
    state = optimizer.state.get(param, {})
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield name, value
    if state and "step" not in state:
        counted = (g["step"] for g in optimizer.param_groups if "step" in g and any(p is param for p in g["params"]))
        for step in counted:
            yield "step", torch.tensor(float(step))


def restore_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    """Give a tensor the state that `optimizer.state` had for it."""
    if not state:
        return
    if (restore := getattr(optimizer, "restore", None)) is not None:  # ScaledAdam
        restore(param, state)
        return
    # FusedAdam stores moments in a dtype of their own, perhaps with a scale
    keep = getattr(optimizer, "set_scaled_state", None)
    if keep is None:
        optimizer.state[param] = state
        return
    for name, value in state.items():
        keep(param, name, value.float())


def restore_group(group: dict[str, Any], saved: dict[str, Any], keeps: Sequence[str]) -> None:
    """Give a param group the entries that were saved of it, but for those that the run keeps (`Inputs.run_keeps`)."""
    for name in group.keys() - saved.keys() - {"params"}:
        del group[name]  # an entry that the first step added
    decouples = group.get("decoupled_weight_decay", False)  # by AdamW, whatever was saved
    starts = {"lr": "initial_lr", "weight_decay": "initial_weight_decay"}  # from which a schedule goes on
    kept = (*keeps, *(starts[name] for name in keeps if name in starts))
    own = {name: group[name] for name in kept if name in group}
    group.update(saved | own)
    if decouples:
        group["decoupled_weight_decay"] = True
