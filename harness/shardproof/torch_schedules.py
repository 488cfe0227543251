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
    GROWING_DECAY,
    WARMUP_START,
    WARMUP_STEPS,
    Share,
    linear_share,
)


class GrowingDecay(LambdaLR):
    """A schedule of a library's own that writes each group's weight decay too, from what it was at first."""

    def __init__(self, optimizer: torch.optim.Optimizer, share: Callable[[int], Share]) -> None:
        for group in optimizer.param_groups:
            group["initial_weight_decay"] = group["weight_decay"]
        self.share = share
        super().__init__(optimizer, lambda steps: share(steps).rate)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Rates for the step that `last_epoch` counts; weight decay is set beside them."""
        self.set_decay()
        return super().get_lr()

    def set_decay(self) -> None:
        """Write every group's weight decay after so many steps."""
        for group in self.optimizer.param_groups:
            group["weight_decay"] = group["initial_weight_decay"] * self.share(self.last_epoch).decay


def shared_schedule(
    share: Callable[[str, int], Share], name: str, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """What a library's own schedule of that name does to the groups of an optimizer; None for `none`.

    Args:
        share: name, steps → what is left of each group's settings (`Contract.schedule_share`).
    """
    if name == "none":
        return None
    if name == GROWING_DECAY:
        return GrowingDecay(optimizer, partial(share, name))
    return LambdaLR(optimizer, lambda steps: share(name, steps).rate)


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
    if at_once and isinstance(schedule, GrowingDecay):
        schedule.set_decay()
