"""Two tensors of one dtype and shape, bit for bit, in pieces of a few megabytes.

*Verifies*: every element has the same bits on both sides; NaN payloads and signs of zero count. *Does not verify*: why
bits differ (`patterns`, `misplaced`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.compare.contents import Reading, Tensor
from shardproof.compare.dtypes import is_float, itemsize, numbers, numpy_of, raw_of, shown
from shardproof.compare.patterns import Patterns
from shardproof.diff import ulp_distance
from shardproof.layout import multi_index

PIECE_BYTES = 16 << 20
"""How much of a tensor is read at once, of each side."""

LOOKED_AT = 1 << 18
"""How many elements are looked at at once where they differ: working them out takes many times their own bytes."""

Raw = npt.NDArray[Any]


@dataclass
class Tally:
    """What is counted of the elements that differ. first, last: flat indices. moved: the sum of the bits of one side
    less that of the other; elements that only changed their places leave it 0."""

    dtype: str
    mismatched: int = 0
    first: int = -1
    last: int = -1
    first_a: str = ""
    first_b: str = ""
    max_ulp: int | None = None
    nan: int = 0
    moved: int = 0
    _buckets: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(65, np.int64))

    def add(self, at: npt.NDArray[np.int64], a: Raw, b: Raw) -> None:
        """Count elements that differ: their flat indices, and the bits of both sides."""
        if self.first < 0:
            self.first, self.first_a, self.first_b = int(at[0]), shown(a[:1], self.dtype), shown(b[:1], self.dtype)
        self.last = int(at[-1])
        self.mismatched += len(at)
        if a.dtype.kind != "u":  # of 16 bytes: no order, no sum
            self.moved = 1
            return
        self.moved += int(a.sum(dtype=np.uint64)) - int(b.sum(dtype=np.uint64))
        distances, nan = _distances(a, b, self.dtype)
        self.nan += nan
        if len(distances):
            self.max_ulp = max(self.max_ulp or 0, int(distances.max()))
            self._buckets += np.bincount(np.searchsorted(_POWERS, distances, side="right"), minlength=65)

    @property
    def same_multiset(self) -> bool:
        """Whether the same bits may be there in another order."""
        return self.moved % (1 << 64) == 0

    def histogram(self) -> tuple[tuple[str, int], ...]:
        """Distances by power of two: `0` (signs of zero), `1`, `2-3`, `4-7` …, `nan`."""
        found = [(_bucket(bits), int(n)) for bits, n in enumerate(self._buckets) if n]
        return tuple([*found, ("nan", self.nan)] if self.nan else found)


_POWERS = np.array([1 << bits for bits in range(64)], np.uint64)


def compare_bits(a: Tensor, b: Tensor, on_read: Callable[[int], None]) -> tuple[Tally, Patterns]:
    """What differs between two tensors of the same dtype and shape.

    Args:
        on_read: called with the number of bytes of the tensor that were compared.

    Raises:
        CheckpointError: a file is damaged.
    """
    tally, patterns = Tally(a.dtype), Patterns(a.dtype)
    one, other = Reading(a), Reading(b)
    step = max(1, PIECE_BYTES // itemsize(a.dtype))
    pair = np.empty((2, min(step, a.numel)), raw_of(a.dtype))
    for first in range(0, a.numel, step):
        count = min(step, a.numel - first)
        mine, its = pair[0, :count], pair[1, :count]
        one.read(first, mine)
        other.read(first, its)
        if not same(mine, its):
            _look(tally, patterns, first, mine, its)
        on_read(count * itemsize(a.dtype))
    one.finish()
    other.finish()
    return tally, patterns


def same(a: Raw, b: Raw) -> bool:
    """Whether two arrays of equal length have the same bits."""
    one, other = a.view(np.uint8), b.view(np.uint8)
    words = len(one) // 8 * 8
    equal = np.array_equal(one[:words].view(np.uint64), other[:words].view(np.uint64))
    return equal and np.array_equal(one[words:], other[words:])


def _look(tally: Tally, patterns: Patterns, first: int, a: Raw, b: Raw) -> None:
    """Count what differs in two pieces that begin at element `first`."""
    for begin in range(0, len(a), LOOKED_AT):
        mine, its = a[begin : begin + LOOKED_AT], b[begin : begin + LOOKED_AT]
        at = np.flatnonzero(mine != its)
        if len(at):
            tally.add(at + first + begin, mine[at], its[at])
            patterns.add(mine[at], its[at])


def index_of(tensor: Tensor, flat: int) -> tuple[int, ...]:
    """The index of a flat element, one entry a dim."""
    return multi_index(tensor.shape, flat)


def _distances(a: Raw, b: Raw, dtype: str) -> tuple[npt.NDArray[np.uint64], int]:
    """Distances of elements that differ, NaNs left out, and how many NaNs there are."""
    if is_float(dtype):
        with np.errstate(invalid="ignore"):
            nan = np.isnan(numbers(a, dtype)) | np.isnan(numbers(b, dtype))
        return ulp_distance(a[~nan], b[~nan]), int(nan.sum())
    if numpy_of(dtype).kind not in "iu":
        return np.empty(0, np.uint64), 0
    wide = np.uint64 if numpy_of(dtype).kind == "u" else np.int64
    x, y = numbers(a, dtype).astype(wide), numbers(b, dtype).astype(wide)
    return np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64), 0


def _bucket(bits: int) -> str:
    return str(bits) if bits < 2 else f"{1 << (bits - 1)}-{(1 << bits) - 1}"
