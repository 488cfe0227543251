"""Which elements of a logical tensor a DTensor holds locally, by arithmetic of our own.

torch computes the same from a DTensor's placements, and a mistake there is one that we want to see; so torch's answer
is not asked for. Placements are read from the left, one per mesh dim. Each dim of the tensor begins as one run of
indices, `[(0, n)]`. `Shard` keeps one chunk of what is left of the dim. `_StridedShard` first cuts what is left into
`split_factor` chunks and keeps a chunk of each: FSDP over tensor parallelism on the same dim, where the inner mesh dim
cuts first although it stands last. For example, 8 rows on a mesh of 2 × 2 with `_StridedShard(0, split_factor=2)` and
`Shard(0)`: at (0, 1) the first keeps rows 0–1 and 4–5, the second keeps 4–5 of those.

Usually one run is left for each dim, which makes one box. Where several are left there are several boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
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
    for sharding in shardings:
        runs[sharding.dim] = _sharded(runs[sharding.dim], sharding)
    whole = [dim or [(n, 0)] for dim, n in zip(runs, shape, strict=True)]
    return list(_boxes(whole))


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
