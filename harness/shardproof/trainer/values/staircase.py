"""Learning rates of param groups that go up by one factor from group to group, as layer-wise decays make them, but for
one step between two groups.

*Verifies*: the ratios of the rates that groups have. *Does not verify*: what the rates should be.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import isclose, log

from shardproof.trainer.values.rounding import At

LEAST = 4
"""Different rates, from which on a factor between neighbours is no chance."""

_RATE = re.compile(r"(.*\bgroup)(\d+)\.lr$")
_NEAR = 1e-6


def staircase(values: At) -> str:
    """A note on rates of which all neighbours but two are apart by the same factor, and these two by a power of it;
    empty where that is not so.

    Args:
        values: what there is before the first step, settings of param groups among it.
    """
    found = {(match[1], int(match[2])): float(value.data.decode().split(" ")[1])
             for (role, name), value in values.items()
             if role == "setting" and (match := _RATE.search(name)) and value.data.startswith(b"float ")}  # fmt: skip
    first: dict[float, tuple[str, int]] = {}
    for group, rate in sorted(found.items(), reverse=True):
        first[rate] = group
    rates = sorted(rate for rate in first if rate > 0)
    if len({prefix for prefix, _ in found}) != 1 or len(rates) < LEAST:
        return ""
    ratios = [after / before for before, after in pairwise(rates)]
    usual = sorted(ratios)[(len(ratios) - 1) // 2]
    odd = [at for at, ratio in enumerate(ratios) if not isclose(ratio, usual, rel_tol=_NEAR)]
    power = log(ratios[odd[0]]) / log(usual) if len(odd) == 1 and usual > 1 else 0.0
    if round(power) < 2 or not isclose(power, round(power), rel_tol=_NEAR):
        return ""
    low, high = rates[odd[0]], rates[odd[0] + 1]
    each = [f"{_first_of(values, first[rate])} at {rate:.6g}" for rate in (low, high)]
    return (
        f"the learning rates of param groups go up by a factor of {usual:.6g} from one to the next, but from "
        f"{each[0]} to {each[1]} by {ratios[odd[0]]:.6g}, as of {round(power)} steps at once: unless one is left out "
        "on purpose, look at how layers are counted"
    )


def _first_of(values: At, group: tuple[str, int]) -> str:
    """The number of a param group, with its first parameter."""
    prefix, number = group
    params = values.get(("setting", f"{prefix}{number}.params"))
    return f"group {number}{f' ({params.data.decode().partition(chr(10))[0]}, …)' if params else ''}"
