"""torch's learning-rate schedules by the names of `shardproof.schedules`: what ranks of a torch loop train under, and
what the twin runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from shardproof.schedules import (
    COSINE_STEPS,
    CYCLE_STEPS,
    FLOOR,
    WARMUP_START,
    WARMUP_STEPS,
    linear_share,
)


def shared_schedule(
    share: Callable[[str, int], float], name: str, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """What a library's own schedule of that name does to the rates of an optimizer; None for `none`.

    Args:
        share: name, steps → what is left of each group's learning rate (`Contract.schedule_share`).
    """
    return None if name == "none" else LambdaLR(optimizer, partial(share, name))


def torch_schedule(name: str, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The schedule of that name over an optimizer; None for `none`."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    match name:
        case "none":
            return None
        case "halve":
            return StepLR(optimizer, step_size=1, gamma=0.5)
        case "linear":
            return LambdaLR(optimizer, linear_share)
        case "cosine":
            return CosineAnnealingLR(optimizer, T_max=COSINE_STEPS, eta_min=rates[0] * FLOOR)
        case "onecycle":
            return OneCycleLR(optimizer, max_lr=rates, total_steps=CYCLE_STEPS)
        case "warmup":
            parts: list[LRScheduler] = [
                LinearLR(optimizer, start_factor=WARMUP_START, total_iters=WARMUP_STEPS),
                CosineAnnealingLR(optimizer, T_max=COSINE_STEPS, eta_min=rates[0] * FLOOR),
            ]
            return SequentialLR(optimizer, parts, milestones=[WARMUP_STEPS])
    raise ValueError(f"torch has no schedule {name!r}")


def go_on_at_own_rates(schedule: LRScheduler, *, at_once: bool) -> None:
    """Make a library's own schedule that was loaded go on from the checkpoint's step at the learning rates that its
    groups were built with (`initial_lr`). at_once: they have them after the load already, not from the next step on."""
    assert isinstance(schedule, LambdaLR)
    groups = schedule.optimizer.param_groups
    schedule.base_lrs = [group["initial_lr"] for group in groups]
    for group, share in zip(groups if at_once else (), schedule.lr_lambdas, strict=at_once):
        group["lr"] = group["initial_lr"] * share(schedule.last_epoch)
