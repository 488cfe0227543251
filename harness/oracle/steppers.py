"""The optimizers that the twin steps with: the very classes that systems use, on whole tensors.

torch.optim for torch's implementations, the emulated FusedAdam and FusedSGD for `multi_tensor`, and where offloading
leaves part of the elements to a kernel of its own, both, element by element as the contract says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from harness.oracle.contracts import PRECISION_AWARE, kernels, rules
from harness.oracle.host_elements import mixes_kernels
from harness.scenario import Optimizer, Scenario

TORCH_DTYPE = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
    "int64": torch.int64, "bool": torch.bool,
}  # fmt: skip

MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_for(
    scenario: Scenario, ask: Optimizer, groups: list[dict[str, Any]], on_host: dict[torch.Tensor, torch.Tensor]
) -> torch.optim.Optimizer:
    """The optimizer of a scenario with the hyperparameters `ask` over param groups.

    Args:
        on_host: of every tensor, which elements are stepped on the host (bool, its shape). Read only where the kernels
            of host and device differ.
    """
    device, host = kernels(scenario)
    if mixes_kernels(scenario):
        return Hybrid(groups, ask, device, host, on_host)
    own_moments = rules(scenario.system).lazy_masters and (scenario.dtype.exp_avg or scenario.dtype.exp_avg_sq)
    if device == "multi_tensor" and (PRECISION_AWARE in scenario.options or own_moments):
        return _precision_aware(scenario, ask, groups)
    return _optimizer(device, ask, groups)


def _optimizer(impl: str, ask: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": ask.lr, "weight_decay": ask.weight_decay}
    adam: dict[str, Any] = {"betas": (ask.beta1, ask.beta2), "eps": ask.eps}
    if impl == "multi_tensor":
        from harness.emulation.apex import FusedAdam, FusedSGD

        if ask.kind == "sgd":
            return FusedSGD(groups, momentum=ask.momentum, nesterov=ask.nesterov, **common)
        return FusedAdam(groups, adam_w_mode=ask.kind == "adamw", **adam, **common)
    common |= {"foreach": impl == "foreach", "fused": impl == "fused"}
    if ask.kind == "sgd":
        return torch.optim.SGD(groups, momentum=ask.momentum, nesterov=ask.nesterov, **common)
    cls = torch.optim.Adam if ask.kind == "adam" else torch.optim.AdamW
    return cls(groups, **adam, **common)


def _precision_aware(scenario: Scenario, ask: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """FusedAdam with moments in dtypes of their own; reads `decoupled_grad`, which may be narrower than its tensor."""
    from harness.emulation.apex import FusedAdam

    policy = scenario.dtype
    return FusedAdam(
        groups, lr=ask.lr, weight_decay=ask.weight_decay, betas=(ask.beta1, ask.beta2), eps=ask.eps,
        adam_w_mode=ask.kind == "adamw", use_decoupled_grad=True,
        exp_avg_dtype=TORCH_DTYPE[policy.exp_avg or "fp32"], exp_avg_sq_dtype=TORCH_DTYPE[policy.exp_avg_sq or "fp32"],
    )  # fmt: skip


class Hybrid(torch.optim.Optimizer):
    """Adam of two kernels: every tensor is stepped by both, and each element takes the result of the one it lies with.

    State is torch's: `exp_avg`, `exp_avg_sq` and `step`, a scalar, of each tensor.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        ask: Optimizer,
        device: str,
        host: str,
        on_host: dict[torch.Tensor, torch.Tensor],
    ) -> None:
        super().__init__(
            groups, {"lr": ask.lr, "weight_decay": ask.weight_decay, "betas": (ask.beta1, ask.beta2), "eps": ask.eps}
        )
        self.ask, self.kernels, self.on_host = ask, (device, host), on_host

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every tensor that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(group, param)

    def _step(self, group: dict[str, Any], param: torch.Tensor) -> None:
        results = [self._stepped(impl, group, param) for impl in self.kernels]
        state = self.state[param]
        for name in MOMENTS:
            device, host = (result[name] for result in results)
            state[name] = torch.where(self.on_host[param], host, device)
        param.copy_(torch.where(self.on_host[param], results[1]["param"], results[0]["param"]))
        state["step"] = torch.tensor(float(state["step"]) + 1 if "step" in state else 1.0)

    def _stepped(self, impl: str, group: dict[str, Any], param: torch.Tensor) -> dict[str, torch.Tensor]:
        """What one kernel makes of a tensor and its moments."""
        assert param.grad is not None
        copy = param.detach().clone()
        copy.grad = param.grad.clone()
        hyper = {name: value for name, value in group.items() if name != "params"}
        optimizer = _optimizer(impl, self.ask, [{**hyper, "params": [copy]}])
        if self.state[param]:
            own = {name: value.clone() for name, value in self.state[param].items()}
            if impl == "multi_tensor":
                optimizer.param_groups[0]["step"] = int(own.pop("step"))
            optimizer.state[copy] = own
        optimizer.step()
        return {"param": copy, **{name: optimizer.state[copy][name] for name in MOMENTS}}


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
    keep = getattr(optimizer, "set_scaled_state", None)  # FusedAdam's moments may have scales beside them
    if keep is None:
        optimizer.state[param] = state
        return
    for name, value in state.items():
        keep(param, name, value.float())
