"""Where Megatron-FSDP keeps each parameter's rows: the buckets of a model and the ranges that ranks own.

This is our own arithmetic of what the library documents. Parameters of one unit, dtype and trainability share a bucket,
a flat buffer; the widest rows come first. Every bucket is cut into equal ranges, one a rank, at multiples of a number
of elements, the *grain*, that is a whole number of rows of each of its larger parameters, so that no cut goes through a
row. A parameter that is smaller than the grain may fill the rest of another's last multiple. For example, a weight of 5
× 4 and a bias of 6 in one bucket have a grain of 4 and need 28 elements, so that each of two ranks owns a range of 16:
the first has rows 0 to 3 of the weight, the second row 4 and the whole bias.

Under Megatron-Core a bucket also ends when it is large enough, and experts have buckets of their own.

*Verifies* nothing by itself. *Does not cover* expert parallelism and shared embeddings of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from math import lcm, prod

from shardproof.layout import Box, chunk
from shardproof.models import ModelSpec, NamedParam, model_spec, storage_dtype
from shardproof.scenario import DTypePolicy, Mesh

Shape = tuple[int, ...]


@lru_cache(maxsize=512)
def local_shapes(model: str, tp: int, tp_index: int) -> dict[str, Shape]:
    """The shape of every parameter's tensor-parallel shard, by canonical name."""
    shapes: dict[str, Shape] = {}
    for named in model_spec(model).unique_params:
        shape = list(named.spec.shape)
        if named.spec.tp_dim is not None:
            shape[named.spec.tp_dim] = chunk(shape[named.spec.tp_dim], tp, tp_index)[1]
        shapes[named.fqn] = tuple(shape)
    return shapes


def buckets(spec: ModelSpec, policy: DTypePolicy) -> list[list[NamedParam]]:
    """The parameters that lie in one flat buffer, in module order."""
    found: dict[tuple[str, str, bool], list[NamedParam]] = {}
    for named in spec.unique_params:
        unit = named.module.path if named.module.unit else ""
        key = (unit, storage_dtype(policy, named.spec), named.spec.trainable == "yes")
        found.setdefault(key, []).append(named)
    return list(found.values())


def place(shapes: list[Shape]) -> tuple[dict[int, int], int, int]:
    """Lay tensors, widest rows first, into one buffer.

    Returns:
        index of a tensor → its offset; elements without padding; the number of elements that ranges are multiples of.
    """
    grain = _grain(shapes)
    numels = [prod(shape) for shape in shapes]
    small = [i for i, n in enumerate(numels) if n < grain]
    large = [i for i, n in enumerate(numels) if n >= grain]
    at: dict[int, int] = {}
    end = 0
    while large:
        first = large.pop(0)
        at[first] = end
        rest = numels[first] % grain
        free = end + numels[first]
        end += -(-numels[first] // grain) * grain
        if not rest:
            continue
        room = grain - rest
        fits = (i for i in large if numels[i] % grain and numels[i] % grain <= room)
        partner = next(fits, None)
        if partner is not None:
            large.remove(partner)
            at[partner] = end - numels[partner] % grain
            room -= numels[partner] % grain
            end += numels[partner] // grain * grain
        for i in list(small):
            if numels[i] <= room:
                at[i] = free
                free, room = free + numels[i], room - numels[i]
                small.remove(i)
    for i in small:
        next_cut = -(-end // grain) * grain
        if end < next_cut < end + numels[i] and (next_cut - end) % prod(shapes[i][1:]):
            end = next_cut  # start at the cut, which would go through a row otherwise
        at[i] = end
        end += numels[i]
    return at, end, grain


def _grain(shapes: list[Shape]) -> int:
    """The least number of elements that ranges are multiples of: a whole number of rows of every tensor that is not
    smaller than it."""
    grain = prod(shapes[0][1:])
    for shape in shapes:
        row, numel = prod(shape[1:]), prod(shape)
        if row != grain and not (grain % row == 0 and numel % grain == 0) and numel >= grain:
            grain = lcm(grain, row)
    return grain


@lru_cache(maxsize=4096)
def rows(model: str, policy: DTypePolicy, parts: int, tp: int, tp_index: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Canonical name → `(first row, rows)` of the tensor-parallel shard that each of `parts` ranks owns."""
    shapes = local_shapes(model, tp, tp_index)
    owned: dict[str, tuple[tuple[int, int], ...]] = {}
    for bucket in buckets(model_spec(model), policy):
        for fqn, cuts in cut([p.fqn for p in bucket], shapes, parts).items():
            row = max(1, prod(shapes[fqn][1:]))
            owned[fqn] = tuple((start // row, numel // row) for start, numel in cuts)
    return owned


def cut(names: list[str], shapes: Mapping[str, Shape], parts: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Name → `(first element, elements)` of the flat tensor that each of `parts` ranks owns, in one bucket."""
    names = sorted(names, key=lambda fqn: -prod(shapes[fqn][1:]))
    at, end, grain = place([shapes[fqn] for fqn in names])
    share = -(-end // (parts * grain)) * grain
    owned = {}
    for index, fqn in enumerate(names):
        edges = [min(max(share * part - at[index], 0), prod(shapes[fqn])) for part in range(parts + 1)]
        owned[fqn] = tuple((a, b - a) for a, b in pairwise(edges))
    return owned


def core_buckets(
    spec: ModelSpec, policy: DTypePolicy, shapes: Mapping[str, Shape], *,
    units: bool, size: int | None, experts: str, prefix: str,
) -> list[list[str]]:  # fmt: skip
    """Names of the parameters of each bucket under Megatron-Core, in module order.

    units: every module is one; otherwise a bucket ends with the parameter by which it has `size` elements. experts:
    what the library finds in the name of an expert's parameter; empty where it finds none. prefix: what the wrapper
    around the model, where there is one, puts before its names. For example, `experts.w1` has `.experts.` in its name
    as `module.experts.w1` only.
    """
    found: dict[tuple[str, str, bool, bool], list[list[str]]] = {}
    for named in spec.unique_params:
        expert = bool(experts) and experts in f"{prefix}{named.fqn}"
        unit = named.module.path if units else ""
        key = (unit, storage_dtype(policy, named.spec), named.spec.trainable == "yes", expert)
        group = found.setdefault(key, [[]])
        if not units and size and sum(prod(shapes[fqn]) for fqn in group[-1]) >= size:
            group.append([])
        group[-1].append(named.fqn)
    return [bucket for group in found.values() for bucket in group]


def owned_box(
    model: str, policy: DTypePolicy, mesh: Mesh, rank: int, fqn: str, *, sharded: bool, outer: bool = False
) -> Box:
    """The box of a parameter (by canonical name) that a rank's optimizer steps: whole rows, or without sharding all
    rows, of its tensor-parallel shard. An empty one starts at the end of dim 0.

    outer: the ranges of a dp_shard rank are cut again among the replicas, so that all data-parallel ranks share.
    """
    spec = model_spec(model).param(fqn).spec
    replica, part, tp_index = mesh.coordinate(rank)
    parts = mesh.dp_shard
    if outer:
        parts, part = mesh.dp, part * mesh.dp_replicate + replica
    start, size = [0] * len(spec.shape), list(spec.shape)
    if spec.tp_dim is not None and mesh.tp > 1:
        start[spec.tp_dim], size[spec.tp_dim] = chunk(spec.shape[spec.tp_dim], mesh.tp, tp_index)
    if sharded:
        first, count = rows(model, policy, parts, mesh.tp, tp_index)[fqn][part]
        start[0], size[0] = (start[0] + first, count) if count else (spec.shape[0], 0)
    return Box(tuple(start), tuple(size))
