"""Running variances that were divided by the number of values in the place of one less, or the other way round.

A norm keeps `v' = (1 - m) v + m s`, of the variance `s` of a batch. Two ways that divide the same squares by `n` and by
`n - 1` come to `a` and `b` with `a = k b + (1 - m)(1 - k) v` and `k = (n - 1) / n`: so two numbers fit all elements.

*Verifies*: that they do, up to `NEAR`, and that `k` is that of a whole number. *Does not verify*: which is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardproof.diff import as_numbers
from shardproof.trainer.values.pairs import Between, Pair

NEAR, LEAST, MOST = 1e-4, 4, 4096
"""How near the fit has to be, as a share of what the buffer changed; from how many elements on; up to which `n`."""


def of_variances(pairs: Sequence[Pair], _: Between) -> str:
    """A sentence on the first buffer of which this is so; empty where there is none, or where parameters differ."""
    if any(pair.name[0] != "buffer" for pair in pairs):
        return ""
    return next(filter(None, map(_told, pairs)), "")


def _told(pair: Pair) -> str:
    if pair.before is None or pair.before.shape != pair.expected.shape:
        return ""
    values = [as_numbers(value).astype(np.float64).ravel() for value in (pair.before, pair.expected, pair.observed)]
    before, one, other = values
    if len(one) < LEAST or not all(np.isfinite(each).all() for each in values) or (before == other).all():
        return ""
    both = np.stack([one, before], 1)
    found, *_ = np.linalg.lstsq(both, other, rcond=None)
    factor, off = float(found[0]), float(np.abs(both @ found - other).max() / np.abs(other - before).max())
    if off > NEAR or factor <= 0 or factor == 1:
        return ""
    less = min(factor, 1 / factor)
    number = round(1 / (1 - less))
    if not 2 <= number <= MOST or abs((1 - less) * number - 1) > NEAR * number:
        return ""
    by, instead = (number, number - 1) if factor < 1 else (number - 1, number)
    return (
        f"What {pair.name[1]} takes in is {factor:.6g} times what it should be, as of a variance that is divided by "
        f"{by} in the place of {instead}."
    )
