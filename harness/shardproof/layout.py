"""Index arithmetic of sharding: which box or flat interval of a logical tensor a rank holds.

There are two ways to cut a tensor here. FSDP cuts each parameter along dim 0, inside the shard that tensor parallelism
leaves; a ZeRO optimizer cuts the flattened tensor into ranges of a buffer. A *box* is a start and a size per dim. A
*flat interval* is a start and a length in elements of the row-major flattened tensor. For example, of a tensor of 5 × 4
over two FSDP ranks the first holds the box from (0, 0) of size (3, 4), which is the flat interval (0, 12); the flat
interval (10, 4) is two boxes, since it begins in the middle of a row.

Everything is integers and tuples. Nothing of ours is imported, so that the checks built on it share no code with what
they check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

Interval = tuple[int, int]


class Box(NamedTuple):
    """A box in a tensor: `start` and `size`, one entry a dim, in elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a scalar's empty tuple."""
        return prod(self.size)


def chunk(size: int, parts: int, index: int) -> Interval:
    """`(start, length)` of one of `parts` chunks of a dim, as `torch.chunk` cuts it.

    Every chunk has `ceil(size / parts)` elements until they run out. An empty chunk starts at `size`, not at
    the start of a chunk that has elements (pytorch/pytorch#150862).

    Raises:
        ValueError: `index` is not one of the parts.
    """
    if not 0 <= index < parts:
        raise ValueError(f"chunk index {index}: allowed: 0 to {parts - 1}; for example: chunk({size}, {parts}, 0)")
    step = -(-size // parts)
    start = min(step * index, size)
    return start, min(step, size - start)


def shard_box(
    shape: tuple[int, ...], sizes: tuple[int, int, int], coordinate: tuple[int, int, int], tp_dim: int | None = None
) -> Box:
    """The box of a parameter that one rank holds under FSDP over tensor parallelism.

    Tensor parallelism chunks `tp_dim` first; `dp_shard` then chunks dim 0 of that local tensor, and
    `dp_replicate` chunks nothing. Where `tp_dim` is 0 this is torch's `_StridedShard`: the shards of one
    tp chunk lie next to each other although dp is the outer mesh dim (pytorch/pytorch#130760).

    Args:
        shape: of the logical tensor; a scalar `()` is held whole by every rank.
        sizes: mesh sizes `(dp_replicate, dp_shard, tp)`.
        coordinate: the rank's `(replicate, shard, tp)` indices in it.
        tp_dim: the dim that tensor parallelism shards; None means replicated over tp.
    """
    start, size = [0] * len(shape), list(shape)
    if tp_dim is not None:
        start[tp_dim], size[tp_dim] = chunk(shape[tp_dim], sizes[2], coordinate[2])
    if shape:
        inner, size[0] = chunk(size[0], sizes[1], coordinate[1])
        start[0] = start[0] + inner if size[0] else shape[0]
    return Box(tuple(start), tuple(size))


def inside(shape: tuple[int, ...], box: Box) -> bool:
    """Whether a box has the tensor's number of dims and no element outside it."""
    return len(box.start) == len(box.size) == len(shape) and all(
        min(at, n) >= 0 and at + n <= whole for at, n, whole in zip(box.start, box.size, shape, strict=True)
    )


def flat_index(shape: tuple[int, ...], index: Sequence[int]) -> int:
    """Row-major flat index of a multi-dim index."""
    flat = 0
    for position, n in zip(index, shape, strict=True):
        flat = flat * n + position
    return flat


def multi_index(shape: tuple[int, ...], flat: int) -> tuple[int, ...]:
    """Multi-dim index of a row-major flat index: the inverse of `flat_index`."""
    index: list[int] = []
    for n in reversed(shape):
        flat, position = divmod(flat, n)
        index.append(position)
    return tuple(reversed(index))


def interval_boxes(shape: tuple[int, ...], start: int, length: int) -> Iterator[Box]:
    """The fewest boxes, in order, whose elements are those of a flat interval.

    Raises:
        ValueError: the interval leaves the tensor.
    """
    if start < 0 or length < 0 or start + length > prod(shape):
        raise ValueError(f"interval [{start}, {start + length}) is not inside a tensor of {prod(shape)} elements")
    if not length:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), (start + length) // row  # whole rows are [first, last)
    if first > last:  # inside one row
        yield from _row_boxes(shape, last, start - last * row, length)
        return
    yield from _row_boxes(shape, first - 1, start - (first - 1) * row, first * row - start)
    if last > first:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _row_boxes(shape, last, 0, start + length - last * row)


def _row_boxes(shape: tuple[int, ...], row: int, start: int, length: int) -> Iterator[Box]:
    """The boxes of a flat interval inside row `row` of dim 0."""
    for box in interval_boxes(shape[1:], start, length):
        yield Box((row, *box.start), (1, *box.size))
