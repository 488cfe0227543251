"""Learning-rate schedules of the reference: torch's, in arithmetic of our own (torch/optim/lr_scheduler.py, 2.13), and
those of libraries, whose contracts say what share of a rate they leave.

A schedule reads and writes param groups, and keeps numbers of its own beside them: what is restored with the optimizer
and what with the schedule are two things. Most of torch's go on from the rate that a group has (`halve`, `cosine`), one
from the rate that the schedule began with (`linear`), and one from numbers that it has put into the groups
(`onecycle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import cos, pi
from typing import Any

from shardproof.entry import resolve
from shardproof.reference.kernels import Hyper
from shardproof.schedules import (
    COSINE_STEPS,
    CYCLE_STEPS,
    FLOOR,
    GROWING_DECAY,
    WARMUP_START,
    WARMUP_STEPS,
    linear_share,
    lines_of_schedule,
)

DIVISOR, FINAL_DIVISOR, RISING, BASE_MOMENTUM, MAX_MOMENTUM = 25.0, 1e4, 0.3, 0.85, 0.95
"""OneCycleLR's defaults."""


@dataclass
class Group:
    """One optimizer param group. names: canonical names in the order the user gave them. peak_lr: what a schedule
    starts from (torch's `initial_lr`). cycle: the highest and lowest rate that a cycle put here. full_decay: what a
    schedule of a library's own lets weight decay grow to."""

    hyper: Hyper
    names: tuple[str, ...]
    peak_lr: float
    cycle: tuple[float, float] | None = None
    full_decay: float = 0.0

    def set_rate(self, rate: float) -> float:
        """Set the learning rate, and return it."""
        self.hyper = replace(self.hyper, lr=rate)
        return rate


@dataclass(frozen=True)
class Schedule:
    """What a schedule keeps.

    * epoch, steps: how often it has stepped, and how often it was told to, its making included.
    * base, last_lr: the rates that it began with, and those that it set last, one a group. floor: what a cosine goes
      down to.
    * parts: those that take turns in it.
    """

    name: str
    epoch: int
    steps: int
    base: tuple[float, ...]
    last_lr: tuple[float, ...]
    floor: float = 0.0
    parts: tuple[Schedule, ...] = ()


def begin(name: str, groups: Sequence[Group], share: str = "") -> Schedule:
    """The schedule of a name over groups, as it is made: some change the groups at once. share: of a library's own
    (`Inputs.share`)."""
    rates, floor = tuple(group.hyper.lr for group in groups), groups[0].hyper.lr * FLOOR
    if share:
        for group in groups:
            group.full_decay = group.hyper.weight_decay
        return Schedule(name, 0, 1, rates, set_shares(name, 0, groups, share), floor)
    if name == "warmup":
        low = tuple(group.set_rate(group.hyper.lr * WARMUP_START) for group in groups)
        parts = (Schedule("rise", 0, 1, rates, low), Schedule("cosine", -1, 1, rates, low, floor))
        return Schedule(name, 0, 0, rates, low, parts=parts)
    if name == "onecycle":
        for group, rate in zip(groups, rates, strict=True):
            group.peak_lr = rate / DIVISOR
            group.cycle = (rate, group.peak_lr / FINAL_DIVISOR)
        rates = tuple(group.peak_lr for group in groups)
        return Schedule(name, 0, 1, rates, tuple(_cycled(group, 0) for group in groups))
    return Schedule(name, 0, 1, rates, rates, floor)


def set_shares(name: str, epoch: int, groups: Sequence[Group], share: str) -> tuple[float, ...]:
    """Set what a library's own schedule leaves of every group's highest rate and whole weight decay, and return the
    rates."""
    left = resolve(share)(name, epoch)
    for group in groups if name == GROWING_DECAY else ():
        group.hyper = replace(group.hyper, weight_decay=group.full_decay * left.decay)
    return tuple(group.set_rate(group.peak_lr * left.rate) for group in groups)


def advanced(schedule: Schedule, groups: Sequence[Group], share: str = "") -> Schedule:
    """The schedule after one more step, which changes the groups. share: of a library's own (`Inputs.share`)."""
    epoch = schedule.epoch + 1
    if share:
        left = set_shares(schedule.name, epoch, groups, share)
        return replace(schedule, epoch=epoch, steps=schedule.steps + 1, last_lr=left)
    if schedule.name == "warmup":
        return _turned(schedule, groups, epoch)
    rates = zip(groups, schedule.base, strict=True)
    match schedule.name:
        case "halve":
            now = [group.set_rate(group.hyper.lr * 0.5) for group in groups]
        case "linear":
            now = [group.set_rate(base * linear_share(epoch)) for group, base in rates]
        case "cosine":
            now = [group.set_rate(_cosine(group.hyper.lr, base, schedule.floor, epoch)) for group, base in rates]
        case "onecycle":
            now = [_cycled(group, epoch) for group in groups]
        case "rise":
            now = [group.set_rate(group.hyper.lr * _rise(epoch)) for group in groups]
        case other:
            raise ValueError(f"the reference has no schedule {other!r}")
    return replace(schedule, epoch=epoch, steps=schedule.steps + 1, last_lr=tuple(now))


def lines(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """Name → line of what torch's class for it keeps."""
    yield from lines_of_schedule(_recorded_entries(schedule))


def _turned(schedule: Schedule, groups: Sequence[Group], epoch: int) -> Schedule:
    """A warm-up that is one step on: the second part begins where the first has ended."""
    first, second = schedule.parts
    if epoch < WARMUP_STEPS:
        first = advanced(first, groups)
    elif epoch == WARMUP_STEPS:
        start = [_floored(base, second.floor, 0) for base in second.base]
        now = [group.set_rate(rate) for group, rate in zip(groups, start, strict=True)]
        second = replace(second, epoch=0, last_lr=tuple(now))
    else:
        second = advanced(second, groups)
    active = first if epoch < WARMUP_STEPS else second
    return replace(schedule, epoch=epoch, last_lr=active.last_lr, parts=(first, second))


def _rise(epoch: int) -> float:
    """The factor of one step of LinearLR."""
    if epoch > WARMUP_STEPS:
        return 1.0
    span = 1.0 - WARMUP_START
    return 1.0 + span / (WARMUP_STEPS * WARMUP_START + (epoch - 1) * span)


def _cosine(rate: float, base: float, floor: float, epoch: int) -> float:
    """The rate of CosineAnnealingLR after one more step, from the rate before it."""
    if (epoch - 1 - COSINE_STEPS) % (2 * COSINE_STEPS) == 0:
        return rate + (base - floor) * (1 - cos(pi / COSINE_STEPS)) / 2
    share = (1 + cos(pi * epoch / COSINE_STEPS)) / (1 + cos(pi * (epoch - 1) / COSINE_STEPS))
    return share * (rate - floor) + floor


def _floored(base: float, floor: float, epoch: int) -> float:
    """The same in closed form."""
    return floor + (base - floor) * (1 + cos(pi * epoch / COSINE_STEPS)) / 2


def _cycled(group: Group, epoch: int) -> float:
    """Set the rate and the momentum (beta1 of Adam) of a group within its cycle, and return the rate."""
    assert group.cycle is not None
    top, bottom = group.cycle
    turn, end = RISING * CYCLE_STEPS - 1, CYCLE_STEPS - 1
    if epoch <= turn:
        share, rates, momenta = epoch / turn, (group.peak_lr, top), (MAX_MOMENTUM, BASE_MOMENTUM)
    else:
        share, rates, momenta = (epoch - turn) / (end - turn), (top, bottom), (BASE_MOMENTUM, MAX_MOMENTUM)
    momentum = _annealed(*momenta, share)
    if group.hyper.kind in ("sgd", "muon"):
        group.hyper = replace(group.hyper, momentum=momentum)
    else:
        group.hyper = replace(group.hyper, beta1=momentum)
    return group.set_rate(_annealed(*rates, share))


def _annealed(start: float, end: float, share: float) -> float:
    """Between two values, along half a cosine."""
    return end + (start - end) / 2.0 * (cos(pi * share) + 1)


def _recorded_entries(schedule: Schedule) -> dict[str, Any]:
    """The entries of torch's state dict that are recorded."""
    if schedule.name == "warmup":
        inner = [
            {**_recorded_entries(part), "last_epoch": part.epoch, "_last_lr": part.last_lr} for part in schedule.parts
        ]
        return {"_milestones": [WARMUP_STEPS], "_schedulers": inner}
    kept: dict[str, Any] = {"_step_count": schedule.steps, "base_lrs": schedule.base}
    match schedule.name:
        case "halve":
            return kept | {"step_size": 1, "gamma": 0.5}
        case "cosine":
            return kept | {"T_max": COSINE_STEPS, "eta_min": schedule.floor}
        case "onecycle":
            return kept | {"total_steps": CYCLE_STEPS, "cycle_momentum": True}
        case "rise":
            return kept | {"start_factor": WARMUP_START, "end_factor": 1.0, "total_iters": WARMUP_STEPS}
    return kept
