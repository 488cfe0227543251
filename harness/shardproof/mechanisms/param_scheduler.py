"""OptimizerParamScheduler of Megatron-Core, and of NeMo Automodel, which took it over: what it is asked for, and what
it leaves of each group's learning rate and weight decay (megatron/core/optimizer_param_scheduler.py, 0.18;
nemo_automodel/components/optim/scheduler.py, 0.7).

    linear         down to 0 in `STEPS`
    cosine         down to 0 in `STEPS`, along half a cosine
    warmup         up to the learning rate in two steps, and down as `cosine`
    wsd            warm-up, stable, decay: up in one step, then level, then down over the last `ANNEALING` of `STEPS`
    growing_decay  the learning rate stays, and weight decay grows from 0 in `STEPS`

Values only: no torch.
"""

from __future__ import annotations

from math import cos, pi

from shardproof.schedules import COSINE_STEPS, GROWING_DECAY, WARMUP_STEPS, Share, linear_share

STEPS = COSINE_STEPS
"""Steps in which a schedule goes from the learning rate to 0, or from no weight decay to all of it."""

ANNEALING = 6
"""The last steps of `wsd`, in which it goes down."""

OWN_SCHEDULES = ("linear", "cosine", "warmup", "wsd", GROWING_DECAY)
"""Schedules that the class makes."""

SHARE = f"{__name__}:share"
"""What contracts name as the schedule's (`Contract.schedule_share`)."""

_STYLES = {"linear": "linear", "cosine": "cosine", "warmup": "cosine", "wsd": "WSD"}
_RISING = {"warmup": WARMUP_STEPS, "wsd": 1}


def asked(schedule: str, rate: str | float, decay: str | float) -> dict[str, str | float | int]:
    """The constructor's arguments for a schedule, `none` included.

    Args:
        rate: the highest learning rate, or Python text that says it. decay: the whole weight decay, likewise.
    """
    growing = schedule == GROWING_DECAY
    arguments: dict[str, str | float | int] = {
        "init_lr": 0.0, "max_lr": rate, "min_lr": 0.0, "lr_warmup_steps": _RISING.get(schedule, 0),
        "lr_decay_steps": STEPS, "lr_decay_style": _STYLES.get(schedule, "constant"),
        "start_wd": 0.0 if growing else decay, "end_wd": decay, "wd_incr_steps": STEPS,
        "wd_incr_style": "linear" if growing else "constant",
    }  # fmt: skip
    if schedule == "wsd":
        arguments |= {"wsd_decay_steps": ANNEALING, "lr_wsd_decay_style": "exponential"}
    return arguments


def share(name: str, steps: int) -> Share:
    """What is left of a group's highest learning rate and of its weight decay after so many steps of a schedule.

    Raises:
        ValueError: a schedule that the class does not make.
    """
    if name not in OWN_SCHEDULES:
        raise ValueError(f"OptimizerParamScheduler is not asked for the schedule {name!r}")
    if name == GROWING_DECAY:
        return Share(1.0, min(1.0, steps / STEPS))
    if name == "linear":
        return Share(linear_share(steps))
    rising = _RISING.get(name, 0)
    if steps < rising:
        return Share(steps / rising)
    if steps > STEPS:
        return Share(0.0)
    if name == "wsd":
        falling = max(0, steps - (STEPS - ANNEALING)) / ANNEALING
        return Share(2.0 * 0.5**falling - 1.0)
    return Share(0.5 * (cos(pi * ((steps - rising) / (STEPS - rising))) + 1.0))
