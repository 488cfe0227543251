"""Whether a value that several ranks make, or that is made several times, is the same in each of these parts in one way
of two, as random numbers are that every rank draws from the same seed.

*Verifies*: the numbers of every part. *Does not verify*: that the parts should be others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardproof.trainer.lines.held import Values
from shardproof.trainer.lines.statements import Outline
from shardproof.trainer.values.telling import times


def same_parts(mine: Values, its: Values, names: tuple[str, str]) -> str:
    """That a value is the same on every rank, or each time, in one of two ways alone, with a comma in front; empty of
    all others. names: of the ways, such as `with mesh=2`."""
    repeated = [_are_one(way.outlines) for way in (mine, its)]
    if repeated[0] == repeated[1]:
        return ""
    way, name = ((mine, its)[repeated[1]], names[repeated[1]])
    if len(way.last) > 1:
        often = f", {times(len(way.outlines) // len(way.last))}" * (len(way.outlines) > len(way.last))
        return f", the same on all {len(way.last)} ranks {name}{often}"
    return f", the same each of the {len(way.outlines)} times that it is made {name}"


def _are_one(parts: Sequence[Outline]) -> bool:
    """Whether there are several parts, which are equal, and of which the numbers are not."""
    if len(parts) < 2 or len({part.numbers.shape for part in parts}) > 1 or parts[0].numbers.size < 2:
        return False
    first = parts[0].numbers
    return all(np.array_equal(first, part.numbers) for part in parts[1:]) and bool(np.ptp(first) > 0)
