"""Whether the learning rates that a run begins with lie above those that its schedule goes out from.

A schedule of torch takes down each group's rate when it is made, as `base_lrs`, and most work out every later rate from
that. A rate that is multiplied afterwards, such as by the number of ranks, holds until the schedule first sets it.

*Does not verify*: rates below, which is how every warm-up begins.
"""

from __future__ import annotations

import re

from shardproof.observe.settings import SETTING
from shardproof.trainer.values.overflows import SCHEDULER
from shardproof.trainer.values.rounding import At

_NUMBER = re.compile(r"float (-?[0-9.e+-]+)")
_BASE = re.compile(r"^(.*\bbase_lrs)\.(\d+)$")
_RATE = re.compile(r"\bgroup(\d+)\.lr$")
NEAR = 1e-6


def above_the_base(values: At) -> str:
    """A note on rates that are one number times those that a schedule goes out from, more than 1; empty of others.

    Args:
        values: what there is before the first step, settings of param groups among it.
    """
    rates = {int(match[1]): float(text) for (role, name), value in values.items()
             if role == SETTING and (match := _RATE.search(name)) and (text := _float(value.data))}  # fmt: skip
    own = [rate for _, rate in sorted(rates.items())]
    bases: dict[str, dict[int, float]] = {}
    for (role, name), value in values.items():
        if role == SCHEDULER and (match := _BASE.search(name)) and (text := _float(value.data)):
            bases.setdefault(match[1], {})[int(match[2])] = float(text)
    for name, found in sorted(bases.items()):
        base = [rate for _, rate in sorted(found.items())]
        if len(base) != len(own) or not all(base):
            continue
        factors = [rate / each for rate, each in zip(own, base, strict=True)]
        factor = factors[0]
        if factor > 1 + NEAR and all(abs(each - factor) <= NEAR * factor for each in factors):
            return (
                f"the run begins with a learning rate of {own[0]:.6g}, and {name} is {base[0]:.6g}: what multiplied "
                f"the rate by {factor:.6g} did not reach the schedule, which goes out from the smaller one when it "
                "next sets the rate"
            )
    return ""


def _float(data: bytes) -> str:
    match = _NUMBER.fullmatch(data.decode())
    return match[1] if match else ""
