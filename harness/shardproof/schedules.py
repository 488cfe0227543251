"""Learning-rate schedules that the `optimizer` axis can name: their constants, and which entries of torch's state are
recorded.

    halve     StepLR: times 0.5 after every step
    linear    LambdaLR: from the learning rate to 0 in `LINEAR_STEPS`
    cosine    CosineAnnealingLR: down to `FLOOR` of the learning rate in `COSINE_STEPS`
    onecycle  OneCycleLR: up to the learning rate and down again in `CYCLE_STEPS`, beta1 or the momentum the other way
    warmup    SequentialLR: LinearLR from `WARMUP_START` of the learning rate in `WARMUP_STEPS`, then as `cosine`

A library may have classes of its own, as Megatron-Core and DeepSpeed have for `linear`, `cosine` and `warmup`, and for
what torch has no class for (`wsd`, `growing_decay`): its contract names a function (`Contract.schedule_share`) which
says what share of each group's learning rate and weight decay they leave after so many steps. Values only: no torch.
`shardproof.torch_schedules` makes torch's classes, `shardproof.reference.schedule` is our own arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardproof.observe.settings import line_of

GROWING_DECAY = "growing_decay"
"""The schedule of a library's own that leaves the learning rate alone and writes the weight decay."""

LINEAR_STEPS = 8
"""Steps after which a linear schedule has reached a learning rate of 0."""

COSINE_STEPS = 8
"""Steps of half a period."""

FLOOR = 0.0625
"""What a cosine goes down to, as a share of the first group's learning rate."""

CYCLE_STEPS = 16
"""Steps of the one cycle; a step beyond it is an error of torch's."""

WARMUP_START, WARMUP_STEPS = 0.25, 2
"""The share of the learning rate that a warm-up starts from, and how long it takes."""

SCHEDULE = "schedule"
"""The role: what a schedule of torch's keeps, by its name there; utf8, a line as of a param group's settings."""

_KEPT = frozenset(
    {"_step_count", "base_lrs", "step_size", "gamma", "T_max", "eta_min", "start_factor", "end_factor", "total_iters",
     "total_steps", "cycle_momentum", "_milestones"}
)  # fmt: skip
"""Entries of a schedule's state dict that are recorded. `last_epoch` and `_last_lr` are records of their own, of the
role `scheduler`, for the outermost schedule; the rest is torch's bookkeeping, which differs between releases."""


_RATES = ("base_lrs", "_last_lr")
"""Learning rates, which are tensors where an optimizer keeps them as such: recorded as the numbers that they hold."""


class Share(NamedTuple):
    """What a library's own schedule leaves of a group's highest learning rate, and of its whole weight decay."""

    rate: float
    decay: float = 1.0


def linear_share(steps: int) -> float:
    """The share of the learning rate that a linear schedule leaves after so many steps."""
    return max(0.0, 1.0 - steps / LINEAR_STEPS)


def lines_of_schedule(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name → line of what a schedule's state dict holds, those of schedules within it as `_schedulers.{i}.{name}`."""
    for name, value in state.items():
        if name in _KEPT or (prefix and name in ("last_epoch", "_last_lr")):
            yield prefix + name, line_of(list(map(float, value)) if name in _RATES else value)
    inner: Sequence[Mapping[str, Any]] = state.get("_schedulers", ())
    for index, own in enumerate(inner):
        yield from lines_of_schedule(own, f"{prefix}_schedulers.{index}.")
