"""Reads boxes of a stored tensor out of its storage in bounded memory, including strided tensors.

A `View` says how a tensor lies in an `Extent`: torch's offset, size and stride, in elements. `read` fills an array with
a box of it. Where the box is one run of bytes on both sides, it is read in place; else the storage is read in windows
of `WINDOW_BYTES`, the one dim with the longest stride cut in halves until a window is enough. So a transposed tensor of
any size takes no more memory than another one, only more reading.

*Verifies*: every element lies inside the storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from shardproof.compare.dtypes import BITS, is_float, itemsize, raw_of
from shardproof.compare.files import FORM, Extent
from shardproof.readers.errors import bad

WINDOW_BYTES = 4 << 20

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in a storage. offset and stride count elements. flags: `neg` and `conj`, torch's bits of a tensor that
    is the negative, or the complex conjugate, of what is stored."""

    extent: Extent
    dtype: str
    offset: int
    shape: Ints
    stride: Ints
    flags: frozenset[str] = frozenset()

    def require_inside(self) -> None:
        """Check that the storage has every element.

        Raises:
            CheckpointError: it has not.
        """
        held = self.extent.length // itemsize(self.dtype)
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.stride, strict=False))
        known = len(self.shape) == len(self.stride) and self.offset >= 0 and min(self.stride, default=0) >= 0
        if prod(self.shape) and (not known or last >= held):
            given = f"offset {self.offset}, size {self.shape}, stride {self.stride}"
            where = f"{self.extent.path}: tensor in {self.extent.name}"
            raise bad(where, given, f"elements inside its storage of {held}", FORM)

    def flat(self, start: int, shape: Ints) -> View:
        """The elements from `start` on of this view, which must be a run of elements, as a tensor of another shape.

        Raises:
            CheckpointError: it is no run, or has not so many elements.
        """
        if contiguous(self.shape) != self.stride and prod(self.shape) > 1:
            where = f"{self.extent.path}: tensor in {self.extent.name}"
            raise bad(where, f"stride {self.stride}", "a flat tensor without gaps", FORM)
        if start < 0 or start + prod(shape) > prod(self.shape):
            where = f"{self.extent.path}: elements of {self.extent.name}"
            given = f"{prod(shape)} from {start} on"
            raise bad(where, given, f"inside its {prod(self.shape)}", FORM)
        return View(self.extent, self.dtype, self.offset + start, shape, contiguous(shape), self.flags)

    def read(self, start: Ints, into: npt.NDArray[Any]) -> None:
        """Fill `into` with the box that begins at `start` and has its shape.

        Args:
            into: of the dtype `raw_of`.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        if into.size:
            offset = self.offset + sum(at * stride for at, stride in zip(start, self.stride, strict=True))
            self._fill(offset, into.shape, self.stride, into)
            if self.flags:
                into[...] = resolved(into, self.dtype, self.flags)

    def _fill(self, offset: int, size: Ints, stride: Ints, into: npt.NDArray[Any]) -> None:
        item = itemsize(self.dtype)
        is_run = all(n == 1 or s == c for n, s, c in zip(size, stride, contiguous(size), strict=True))
        if is_run and into.flags.c_contiguous:
            self.extent.read_into(offset * item, into.reshape(-1).view(np.uint8).data)
            return
        spans = [(n - 1) * s for n, s in zip(size, stride, strict=True)]
        span = sum(spans) + 1
        dim = spans.index(max(spans))
        if span * item > WINDOW_BYTES and size[dim] > 1:
            half = size[dim] // 2
            for begin, count in ((0, half), (half, size[dim] - half)):
                inner = (*size[:dim], count, *size[dim + 1 :])
                where = (slice(None),) * dim + (slice(begin, begin + count),)
                self._fill(offset + begin * stride[dim], inner, stride, into[where])
            return
        window = np.empty(span, raw_of(self.dtype))
        self.extent.read_into(offset * item, window.view(np.uint8).data)
        into[...] = as_strided(window, size, tuple(s * item for s in stride), writeable=False)


def resolved(raw: npt.NDArray[Any], dtype: str, flags: frozenset[str]) -> npt.NDArray[Any]:
    """The bits of a tensor's elements, from stored ones and the tensor's flags.

    A sign is one bit of a floating-point number, also of NaN, and of each part of a complex one; an integer is
    negated as two's complement.
    """
    parts = 2 if dtype.startswith("complex") else 1
    if parts == 1 and not is_float(dtype):
        return np.negative(raw) if "neg" in flags else raw
    unsigned = BITS[itemsize(dtype) // parts]
    numbers = np.array(raw).reshape(-1).view(unsigned).reshape(-1, parts)
    sign = 1 << (8 * itemsize(dtype) // parts - 1)
    negated = "neg" in flags
    signs = (negated, negated != ("conj" in flags)) if parts == 2 else (negated,)
    numbers ^= np.array([sign * flipped for flipped in signs], unsigned)
    bits: npt.NDArray[Any] = numbers.reshape(-1).view(raw.dtype).reshape(raw.shape)
    return bits


def contiguous(shape: Ints) -> Ints:
    """The stride of a row-major tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
