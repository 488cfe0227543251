"""Finds how one array's elements are arranged in another: permuted slices, exchanged dims, or a shift.

Pure arithmetic on two arrays of equal shape, for the rules about one tensor (`shardproof.diagnosis.rules.order`) and
for two checkpoints (`shardproof.compare.misplaced`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardproof.observe.assemble import Bits

FARTHEST = 16
"""By how many elements a tensor may have moved along, to be recognised."""

DISTINCT = 3
"""So many different elements must agree, or it may be chance."""


def slice_order(wanted: Bits, got: Bits) -> tuple[int, ...] | None:
    """Which slice of `wanted`, along dim 0, each slice of `got` is, if that is a permutation of distinct slices."""
    places = {part.tobytes(): index for index, part in enumerate(wanted)}
    if len(places) != len(wanted):
        return None
    order = [places.get(part.tobytes(), -1) for part in got]
    return tuple(order) if sorted(order) == list(range(len(wanted))) else None


def order_name(order: Sequence[int], counts: Collection[int]) -> str:
    """A name for a permutation of slices, if it is one of the usual mistakes; empty otherwise.

    Args:
        counts: numbers of chunks that two levels of sharding may have.
    """
    for name, chunks in _usual_orders(len(order), counts):
        if [i for start, end in chunks for i in range(start, end)] == list(order):
            return name
    return ""


def _usual_orders(size: int, counts: Collection[int]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Usual wrong orders of the chunks of a dim, as `(start, end)` in the order observed."""
    for parts in range(2, size + 1):
        bounds = _bounds(size, parts)
        if parts > 10:
            yield f"the {parts} chunks sorted as text", [bounds[i] for i in sorted(range(len(bounds)), key=str)]
        yield f"the {parts} chunks in reverse", bounds[::-1]
    for outer in sorted(counts):
        for inner in sorted(counts):
            bounds = _bounds(size, outer * inner)
            if len(bounds) == outer * inner and outer > 1 and inner > 1:
                exchanged = [bounds[i * inner + j] for j in range(inner) for i in range(outer)]
                yield f"{outer} × {inner} chunks with the two levels of sharding exchanged", exchanged


def _bounds(size: int, parts: int) -> list[tuple[int, int]]:
    step = -(-size // parts)
    edges = [min(step * i, size) for i in range(parts + 1)]
    return [(start, end) for start, end in pairwise(edges) if end > start]


def exchanged_dims(wanted: Bits, got: Bits) -> tuple[int, int] | None:
    """The two neighbouring dims whose exchange makes the elements of `got`, which has the shape of `wanted`."""
    flat = got.reshape(-1)
    for first, second in pairwise(range(wanted.ndim)):
        if np.array_equal(np.swapaxes(wanted, first, second).reshape(-1), flat):
            return first, second
    return None


def moved_along(wanted: Bits, got: Bits, first: int) -> int | None:
    """By how many elements everything from element `first` on is too early (or, below 0, too late); both are flat."""
    for by in (offset for n in range(1, min(FARTHEST + 1, len(got) - first)) for offset in (n, -n)):
        source, target = _overlap(wanted, got, first, by)
        same = len(target) >= DISTINCT and source[0] == target[0] and (source == target).all()
        if same and distinct(target) >= DISTINCT:
            return by
    return None


def distinct(values: npt.NDArray[np.generic]) -> int:
    """How many different values there are; of few, much faster than `np.unique`."""
    return len(set(values.reshape(-1).tolist()))


def _overlap(
    wanted: npt.NDArray[np.generic], got: npt.NDArray[np.generic], first: int, by: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """Expected and observed elements that face each other if everything from `first` on moved forward by `by`."""
    if by > 0:
        return wanted[first + by :], got[first : len(got) - by]
    return wanted[first : len(wanted) + by], got[first - by :]
