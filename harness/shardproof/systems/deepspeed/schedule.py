"""DeepSpeed's own schedules (deepspeed/runtime/lr_schedules.py, 0.19): what its configuration is asked for, and what
they make of a learning rate.

    linear  WarmupDecayLR: up to the learning rate in `RISING` steps, linearly, and down to 0 at step `TOTAL`
    cosine  WarmupCosineLR: up from `START` of the learning rate in the same way, and down to `FLOOR` of it
    warmup  WarmupLR: up to the learning rate in `LOGARITHMIC` steps, by their logarithm, and no further

Each sets the lowest rate when it is made, and counts its first step as number 0: a step with the lowest rate comes
twice. They keep the number of the last step alone, so that a run which goes on from a checkpoint goes on with the rates
that it asks for itself, at its next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, log, pi
from typing import Any

from shardproof.schedules import Share
from shardproof.systems.deepspeed.contract import OWN_SCHEDULES

RISING, LOGARITHMIC, TOTAL, START, FLOOR = 2, 4, 8, 0.25, 0.0625


def asked_schedule(name: str, rates: Sequence[float], *, rates_are_default: bool) -> dict[str, Any]:
    """The table `scheduler` of the engine's configuration.

    Args:
        rates: the learning rate of each param group.
        rates_are_default: whether WarmupLR rises to them unless it is told otherwise, as it does since 0.17.2; then it
            is told nothing, as most users do.
    """
    own: dict[str, Any]
    match name:
        case "linear":
            kind, own = "WarmupDecayLR", {"warmup_num_steps": RISING, "total_num_steps": TOTAL}
        case "cosine":
            kind, own = "WarmupCosineLR", {"warmup_num_steps": RISING, "total_num_steps": TOTAL}
            own |= {"warmup_min_ratio": START, "cos_min_ratio": FLOOR}
        case _:
            kind, own = "WarmupLR", {"warmup_num_steps": LOGARITHMIC}
    if name != "cosine":
        own |= {"warmup_min_lr": 0.0, "warmup_max_lr": list(rates)}
    if name == "warmup" and rates_are_default:
        del own["warmup_max_lr"]
    return {"type": kind, "params": own | {"warmup_type": "log" if name == "warmup" else "linear"}}


def share(name: str, steps: int) -> Share:
    """What is left of a group's learning rate after so many steps of the schedule.

    Raises:
        ValueError: a schedule that the library has no class for.
    """
    if name not in OWN_SCHEDULES:
        raise ValueError(f"DeepSpeed has no schedule {name!r} of its own")
    return Share(_rate_left(name, steps))


def _rate_left(name: str, steps: int) -> float:
    if steps == 0:
        return 0.0
    number = steps - 1
    if name == "warmup":
        return 1.0 / log(LOGARITHMIC) * log(number + 1) if number < LOGARITHMIC else 1.0
    if number < RISING:
        rise = number / RISING
        return rise if name == "linear" else START + rise * (1.0 - START)
    if name == "linear":
        return max(0.0, float(TOTAL - number) / float(max(1.0, TOTAL - RISING)))
    fallen = min(1.0, (number - RISING + 1) / (TOTAL - RISING))
    return max(0.0, FLOOR + (1.0 - FLOOR) * ((1 + cos(pi * fallen)) / 2))
