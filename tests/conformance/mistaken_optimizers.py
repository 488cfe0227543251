"""Optimizers that are momentum SGD with one mistake or peculiarity each, which `shardproof optimizer` must notice."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Momentum(torch.optim.Optimizer):
    """SGD with momentum 0.5, without a mistake."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(0.5).add_(param.grad)
                self.update(param, momentum, group)

    def update(self, param: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(momentum * group["lr"])


class LocalNorm(Momentum):
    """Divides by the norm of what this rank holds."""

    def update(self, param: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        held = momentum.to_local() if isinstance(momentum, DTensor) else momentum
        param.sub_(momentum * (group["lr"] / (held.norm().item() + 1)))


class WholeNorm(Momentum):
    """Divides by the norm of the whole tensor, as it should: it only rounds otherwise."""

    def update(self, param: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        norm = momentum.pow(3).norm()
        size = norm.full_tensor() if isinstance(norm, DTensor) else norm
        param.sub_(momentum * (group["lr"] / (size.item() + 1)))


class Forgetful(Momentum):
    """Counts its steps where no state dict sees it."""

    steps = 0

    def update(self, param: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        self.steps += 1
        param.sub_(momentum * (group["lr"] / self.steps))


class OneLearningRate(Momentum):
    """Steps every group with the learning rate that it was made with."""

    def update(self, param: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(momentum * self.defaults["lr"])


class Copied(Momentum):
    """Keeps a copy of the learning rate, which no schedule reaches."""

    def __init__(self, params: Any, lr: Any = 0.125) -> None:
        super().__init__(params, lr)
        self.kept = float(lr) if isinstance(lr, torch.Tensor) else None

    def update(self, param: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(momentum * (group["lr"] if self.kept is None else self.kept))


class NoShards(Momentum):
    """Says that it takes no sharded parameters."""

    def update(self, param: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        if isinstance(param, DTensor):
            raise RuntimeError("sharded parameters are not supported")
        super().update(param, momentum, group)


class Places(Momentum):
    """Steps the first row of what it is given half as far, so that cutting a tensor up makes a difference."""

    def update(self, param: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        factor = torch.ones(param.shape[0])
        factor[0] = 0.5
        if isinstance(param, DTensor):
            raise RuntimeError("sharded parameters are not supported")
        param.sub_(momentum * factor.reshape(-1, *[1] * (param.dim() - 1)) * group["lr"])
