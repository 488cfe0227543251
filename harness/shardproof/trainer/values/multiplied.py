"""Whether a step leaves all parameters about the same number of times what they were, as an average does that is
divided by another count than it sums over. What an optimizer writes beside is small against that.

*Does not verify*: which number is meant; it is told, and not judged.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.diff import as_numbers
from shardproof.trainer.values.rounding import FLOATS, PARAMS, At

LEAST_NUMBERS = 8
"""Of a parameter; of fewer, a step of any kind may look like a multiple."""

LEAST_PARAMETERS = 2

NEAR = 0.1
"""The most by which the numbers of two parameters may be apart, as a share of their median."""

ALIKE = 0.95
"""The least cosine between a parameter before the step and after it."""

USUAL = (0.8, 1.25)
"""Between these a weight decay and an average with an older copy may well leave a parameter."""


def multiplied(before: At, after: At, step: int, lines: str) -> str:
    """A note on a step after which all parameters are about one number times what they were; empty of any other.

    Args:
        before, after: what there is before the step and after it. lines: which lines write parameters in it, or empty.
    """
    names = [name for name, value in before.items() if name[0] == PARAMS and value.dtype in FLOATS and name in after
             and prod(value.shape) >= LEAST_NUMBERS and after[name].shape == value.shape]  # fmt: skip
    numbers = [(as_numbers(before[name]).astype(np.float64).ravel(), as_numbers(after[name]).astype(np.float64).ravel())
               for name in names]  # fmt: skip
    found = [_times(one, other) for one, other in numbers if one.any()]
    times = [number for number in found if number is not None]
    if len(times) < LEAST_PARAMETERS or len(times) < len(found):
        return ""
    median = float(np.median(times))
    if USUAL[0] <= median <= USUAL[1] or any(abs(each - median) > NEAR * abs(median) for each in times):
        return ""
    where = f"; parameters are written there by {lines}" if lines else ""
    return (
        f"step {step} leaves all {len(times)} parameters of {LEAST_NUMBERS} numbers and more about {median:.2g} times "
        f"what they were before it, as a sum or an average does whose weights do not come to 1{where}"
    )


def _times(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> float | None:
    """How many times a parameter is what it was; None where it is no multiple."""
    if not (np.isfinite(before).all() and np.isfinite(after).all() and after.any()):
        return None
    along = float(before @ after)
    if along < ALIKE * float(np.linalg.norm(before) * np.linalg.norm(after)):
        return None
    return along / float(before @ before)
