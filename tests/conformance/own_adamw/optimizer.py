"""An AdamW as a training script might have it, and one with a mistake that only sharding shows."""

from __future__ import annotations

from typing import Any

import torch
from shardproof.oracle.inputs import Stepper
from torch.distributed.tensor import DTensor


class OwnAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019), computed as torch.optim.AdamW with `foreach=False` does."""

    def __init__(self, params: Any, **numbers: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, **numbers})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not self.left_out(param):
                    self._update(param, self._state_of(param), group)

    def left_out(self, param: torch.Tensor) -> bool:
        """Whether this rank has nothing to do for a parameter."""
        return False

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state

    def _update(self, param: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), lr, grad = group["betas"], group["lr"], param.grad
        assert grad is not None
        state["step"] += 1
        step = state["step"].item()
        param.mul_(1 - lr * group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        param.addcdiv_(state["exp_avg"], denominator, value=-(lr / (1 - beta1**step)))


class HastyAdamW(OwnAdamW):
    """The same, which leaves out parameters of which this rank holds no element, and their step count with them."""

    def left_out(self, param: torch.Tensor) -> bool:
        return isinstance(param, DTensor) and param.to_local().numel() == 0


def for_the_twin(stepper: Stepper, groups: list[dict[str, Any]]) -> OwnAdamW:
    """The same class on whole tensors, in one process."""
    return OwnAdamW(groups)
