"""Constructs the optimizer under question, and makes the calls that a training script makes around its steps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from shardproof.entry import resolve
from shardproof.optimizers.arms import Arm
from shardproof.optimizers.request import value_of

USUAL_LR = 0.01
"""The learning rate of an optimizer that has none by default."""

WEIGHT_DECAY = 0.25
"""That of the second param group, where the optimizer has one."""


def class_of(path: str) -> type[torch.optim.Optimizer]:
    """The class of an import path."""
    module, _, name = path.rpartition(".")
    found: type[torch.optim.Optimizer] = resolve(f"{module}:{name}")
    return found


def optimizer_of(
    arm: Arm, groups: Sequence[Sequence[torch.Tensor]], init_seed: int, first: int = 0
) -> torch.optim.Optimizer:
    """The optimizer over param groups.

    Args:
        groups: the tensors of each. init_seed: number of the build; a later one has twice the learning rate, so that a
            load that does not restore it is seen. first: which of the arm's groups the first of these is.
    """
    cls = class_of(arm.path)
    options: dict[str, Any] = {name: _resolved(value_of(text)) for name, text in arm.arguments}
    known = parameters_of(cls)
    lr = _lr(options, known) * (2 if init_seed else 1)
    if "lr" in known:
        options["lr"] = _made(lr, arm)
    described: list[dict[str, Any]] = [{"params": list(group)} for group in groups]
    for number, group in enumerate(described, first):
        if number:
            group |= {"lr": _made(lr / 2, arm)} if "lr" in known else {}
            group |= {"weight_decay": WEIGHT_DECAY} if "weight_decay" in known else {}
    return cls(described if arm.groups != "one" else described[0]["params"], **options)


def _lr(options: dict[str, Any], known: dict[str, inspect.Parameter]) -> float:
    default = known["lr"].default if "lr" in known else USUAL_LR
    given = options.get("lr", default)
    return float(given) if isinstance(given, int | float) else USUAL_LR


def _made(lr: float, arm: Arm) -> float | torch.Tensor:
    return torch.tensor(lr) if arm.lr == "tensor" else lr


def parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    """What a class's constructor takes behind `self` and the parameters."""
    found = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    return {parameter.name: parameter for parameter in found[2:]}


def _resolved(value: Any) -> Any:
    """A name of torch as what it names; in lists and dictionaries too."""
    if isinstance(value, str) and value.startswith("torch."):
        return resolve(":".join(value.rsplit(".", 1)))
    return value


def seed(init_seed: int) -> None:
    """Start the random generator anew, so that optimizers that draw numbers draw the same ones in every arm."""
    torch.manual_seed(1 + init_seed)


def enter(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Call the `train` or `eval` that schedule-free optimizers have, as their users do before steps and saves."""
    change = getattr(optimizer, mode, None)
    if callable(change):
        change()


def halve_lr(optimizer: torch.optim.Optimizer) -> None:
    """Halve every group's learning rate as torch's schedulers set it: a tensor in place, a number by another one."""
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"].fill_(group["lr"].item() / 2)
        elif "lr" in group:
            group["lr"] = group["lr"] / 2
