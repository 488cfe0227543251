"""Which elements a rank of Megatron's distributed optimizer owns, from the written contract.

There is a gradient buffer for each storage dtype, in the order in which the model shows them (`flat_buffers` has the
layout and an example). Every data-parallel rank owns an equal part of every bucket of it, and so at most one interval
of a parameter: its *shard*, which may be empty.

Source: megatron.core.optimizer.distrib_optimizer._build_model_and_main_param_groups,
distributed.param_and_grad_buffer._ParamAndGradBuffer (0.13 to 0.19); never the library's own index maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.mechanisms.megatron.switches import several_buckets
from shardproof.models import NamedParam, storage_dtype
from shardproof.scenario import Mesh, Scenario

BUCKET_ELEMENTS = 48
"""Elements after which a bucket is closed, where the scenario has several."""

START, END = 64, 128
"""Multiples, in elements, to which the start of a parameter and the end of a bucket are padded."""


@dataclass(frozen=True)
class Shard:
    """Elements `start` to `end` of what a model-parallel rank has of a parameter, flattened, owned by one rank."""

    fqn: str
    start: int
    end: int


def shards(scenario: Scenario, trained: list[NamedParam], mesh: Mesh, rank: int, experts: int = 1) -> Iterator[Shard]:
    """What a rank owns of some parameters, in the order in which its optimizer holds them. Without a distributed
    optimizer that is everything, in the model's order.

    Args:
        rank: its index among the `mesh.dp_shard` ranks that share the parameters out.
        experts: over how many ranks the experts of a parameter were shared out before that.
    """
    if scenario.sharding == "replicate":
        yield from (Shard(param.fqn, 0, local_numel(param, mesh, experts)) for param in trained)
        return
    buffers: dict[str, list[NamedParam]] = {}
    for param in trained:
        buffers.setdefault(storage_dtype(scenario.dtype, param.spec), []).append(param)
    for storage in sorted(buffers, key=lambda dtype: dtype != "fp32"):
        yield from _owned(buffers[storage], scenario, mesh, rank, experts)


def _owned(params: list[NamedParam], scenario: Scenario, mesh: Mesh, rank: int, experts: int) -> Iterator[Shard]:
    """What a rank owns of one buffer, bucket by bucket."""
    limit = BUCKET_ELEMENTS if several_buckets(scenario.options) else 0
    bucket: list[tuple[NamedParam, int]] = []
    start = end = 0
    for param in reversed(params):
        at = -(-end // START) * START
        end = at + local_numel(param, mesh, experts)
        bucket.append((param, at))
        if limit and end - start >= limit:
            yield from _of_bucket(bucket, start, end, mesh, rank, experts)
            start = end = _padded_end(end, mesh)
            bucket = []
    if bucket:
        yield from _of_bucket(bucket, start, end, mesh, rank, experts)


def _of_bucket(
    bucket: list[tuple[NamedParam, int]], start: int, end: int, mesh: Mesh, rank: int, experts: int
) -> Iterator[Shard]:
    share = (_padded_end(end, mesh) - start) // mesh.dp_shard
    low, high = start + rank * share, start + (rank + 1) * share
    for param, at in bucket:
        first, last = max(low, at), min(high, at + local_numel(param, mesh, experts))
        if first < last:
            yield Shard(param.fqn, first - at, last - at)


def _padded_end(end: int, mesh: Mesh) -> int:
    multiple = lcm(mesh.dp_shard, END)
    return -(-end // multiple) * multiple


def local_numel(param: NamedParam, mesh: Mesh, experts: int = 1) -> int:
    """Elements of a parameter that a model-parallel rank has."""
    parts = (mesh.tp if param.spec.tp_dim is not None else 1) * (experts if param.spec.ep_dim is not None else 1)
    return param.spec.numel // parts


def whole(pieces: Sequence[npt.NDArray[Any]], param: NamedParam, dim: int | None) -> npt.NDArray[Any]:
    """A logical tensor, put together from the flattened parts of the ranks that share `dim` out. Without a `dim` each
    rank has all of it.

    Raises:
        ValueError: the ranks do not divide the dim.
    """
    shape, parts = param.spec.shape, len(pieces)
    if parts == 1 or dim is None:
        return pieces[0].reshape(shape)
    piece = (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])
    if prod(piece) != pieces[0].size:
        raise ValueError(f"{parts} ranks do not divide dim {dim} of {param.fqn}, {list(shape)}: allowed: its divisors")
    return np.concatenate([each.reshape(piece) for each in pieces], axis=dim)
