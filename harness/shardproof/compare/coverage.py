"""Checks that the pieces of a sharded tensor cover the tensor exactly once, without gap or overlap.

*Verifies*: parts lie inside the tensor; none shares an element with another; together they have as many elements as it.
"""

from __future__ import annotations

from math import prod

import numpy as np

from shardproof.compare.contents import Part, Tensor


def flaw(tensor: Tensor) -> tuple[str, str] | None:
    """`gap` or `overlap` and one sentence about it; None for parts that are sound."""
    parts = [part for part in tensor.parts if prod(part.size)]
    for part in parts:
        if any(a + n > whole for a, n, whole in zip(part.start, part.size, tensor.shape, strict=True)):
            return "overlap", f"a piece {_box(part)} leaves the tensor of {list(tensor.shape)}"
    met = _overlapping(parts, len(tensor.shape))
    if met is not None:
        return "overlap", f"the pieces {_box(met[0])} and {_box(met[1])} share elements"
    held, total = sum(prod(part.size) for part in parts), tensor.numel
    if held != total:
        return "gap", f"{total - held} of {total} elements are in no piece"
    return None


def _overlapping(parts: list[Part], dims: int) -> tuple[Part, Part] | None:
    """Two parts that share elements. Parts are taken by their start along dim 0, so that each is compared only with
    those that begin before it ends there."""
    if len(parts) < 2:
        return None
    if not dims:
        return parts[0], parts[1]
    parts = sorted(parts, key=lambda part: part.start)
    starts = np.array([part.start for part in parts], np.int64)
    ends = starts + np.array([part.size for part in parts], np.int64)
    for index in range(len(parts) - 1):
        until = int(np.searchsorted(starts[:, 0], ends[index, 0]))
        later = slice(index + 1, until)
        shared = ((starts[later] < ends[index]) & (ends[later] > starts[index])).all(axis=1)
        if shared.any():
            return parts[index], parts[index + 1 + int(np.argmax(shared))]
    return None


def _box(part: Part) -> str:
    ends = (f"{at}:{at + n}" for at, n in zip(part.start, part.size, strict=True))
    return f"[{', '.join(ends)}]"
