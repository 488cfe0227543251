"""torch's learning-rate schedules by the names of `shardproof.schedules`: what ranks of a torch loop train under, and
what the twin runs."""

from __future__ import annotations

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
    megatron_share,
)


def megatron_schedule(name: str, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """What Megatron's own schedule of that name does to the rates of an optimizer; None for `none`."""
    return None if name == "none" else LambdaLR(optimizer, partial(megatron_share, name))


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


def go_on_at_own_rates(schedule: LRScheduler, name: str) -> None:
    """Make one of Megatron's schedules that was loaded go on from the checkpoint's step at the learning rates that its
    groups were built with (`initial_lr`)."""
    schedule.base_lrs = [group["initial_lr"] for group in schedule.optimizer.param_groups]
    for group in schedule.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * megatron_share(name, schedule.last_epoch)
