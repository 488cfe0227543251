"""Which elements of a logical tensor a DTensor holds locally, by arithmetic of our own.

torch computes the same from a DTensor's placements, and a mistake there is one that we want to see; so torch's answer
is not asked for. Placements are read from the left, one per mesh dim. Each dim of the tensor begins as one run of
indices, `[(0, n)]`, and `Shard` keeps one chunk of what is left of it.

`_StridedShard` says that a mesh dim cuts after those to its right: FSDP over tensor parallelism on the same dim, where
`split_factor` is into how many chunks those cut. So they go first. For example, 7 rows on a mesh of 3 × 2 with
`_StridedShard(0, split_factor=2)` and `Shard(0)`: at (2, 1) tensor parallelism keeps rows 4–6, and FSDP row 6 of those.
Read from the left instead, as if `_StridedShard` kept a chunk of each of two chunks, row 6 would be at (2, 0): the two
readings are one only where chunks are even.

A `_StridedShard` whose factor is not that of the mesh dims to its right, as reshaping leaves some, is read from the
left. Then several runs may be left of a dim, which make several boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from shardproof.layout import Box, Interval, chunk

Runs = list[Interval]
"""Indices of one dim in order, as `(start, length)` of runs that do not touch."""


class Cut(NamedTuple):
    """A box of the logical tensor, and `window`, the box of the local tensor in which its elements lie."""

    box: Box
    window: Box


class Sharding(NamedTuple):
    """What one mesh dim does to a tensor: it chunks tensor dim `dim` into `parts`, of which this rank has
    number `place`. split_factor: of a `_StridedShard`, otherwise 1."""

    dim: int
    parts: int
    place: int
    split_factor: int = 1


def cuts_of(shape: tuple[int, ...], shardings: Sequence[Sharding]) -> list[Cut]:
    """The boxes that a rank holds; mesh dims that replicate have no entry in `shardings`. A rank without elements has
    one empty box, which says that it holds nothing and is not just silent."""
    runs: list[Runs] = [[(0, n)] for n in shape]
    for sharding in _in_order(shardings):
        runs[sharding.dim] = _sharded(runs[sharding.dim], sharding)
    whole = [dim or [(n, 0)] for dim, n in zip(runs, shape, strict=True)]
    return list(_boxes(whole))


def _in_order(shardings: Sequence[Sharding]) -> list[Sharding]:
    """Shardings in the order in which they cut: a strided sharding, as a plain one, after those to its right."""
    ordered: list[Sharding] = []
    for sharding in reversed(shardings):
        inner = prod(other.parts for other in ordered if other.dim == sharding.dim)
        if sharding.split_factor == inner > 1:
            ordered.append(sharding._replace(split_factor=1))
        else:
            ordered.insert(0, sharding)
    return ordered


def _boxes(runs: list[Runs]) -> Iterator[Cut]:
    """One box for each choice of one run per dim. A run's place in the local tensor is what the runs before it add up
    to."""
    placed = []
    for dim in runs:
        position, of_dim = 0, []
        for start, length in dim:
            of_dim.append((start, length, position))
            position += length
        placed.append(of_dim)
    for choice in product(*placed):
        size = tuple(length for _, length, _ in choice)
        yield Cut(
            Box(tuple(start for start, _, _ in choice), size), Box(tuple(position for _, _, position in choice), size)
        )


def _sharded(runs: Runs, sharding: Sharding) -> Runs:
    kept: Runs = []
    for part in range(sharding.split_factor):
        outer = _chunk(runs, sharding.split_factor, part)
        kept += _chunk(outer, sharding.parts, sharding.place)
    return _merged(kept)


def _chunk(runs: Runs, parts: int, index: int) -> Runs:
    """One chunk of the indices, as `torch.chunk` cuts a tensor of that many elements."""
    start, length = chunk(sum(length for _, length in runs), parts, index)
    kept, position = [], 0
    for first, count in runs:
        low, high = max(start, position), min(start + length, position + count)
        if low < high:
            kept.append((first + low - position, high - low))
        position += count
    return kept


def _merged(runs: Runs) -> Runs:
    joined: Runs = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined
