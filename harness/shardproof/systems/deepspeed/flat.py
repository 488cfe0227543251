"""Where an element of a parameter lies in ZeRO's flat buffers: our own arithmetic, which the library never sees.

Stages 1 and 2 lay the trainable parameters of a param group one after the other, pad the end to a multiple of twice the
number of ranks, and cut the whole into equal parts, one a rank. A part begins and ends anywhere inside a parameter. For
example, parameters of 5 and 4 elements on 2 ranks make a buffer of 12: rank 0 has the first 5 and 1 of the second, rank
1 has 3 of the second and 3 elements of padding.

Stage 3 cuts each parameter for itself into parts of ceil(elements / ranks), the last ones shorter or empty, and lays a
rank's parts of a group one after the other, with their padding. A group is cut into sub-groups once the parts in it
come to `sub_group_size` elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardproof.models import NamedParam, model_spec, storage_dtype
from shardproof.observe.record import ITEMSIZE
from shardproof.scenario import Mesh, Scenario

ROUND_ROBIN, ALIGNED, SUB_GROUPS = "round_robin", "parameter_alignment", "sub_groups"
"""Switches that change the layout."""

SUB_GROUP_SIZE = 24
"""Elements of a sub-group under the switch `sub_groups`; small, so that tiny models have several."""

_START_ALIGNMENT = 2
"""Elements, times the number of ranks, of which the size of a flat buffer is a multiple."""

_ADDRESS_ALIGNMENT_BYTES = 16
"""What a parameter's beginning is a multiple of under `parameter_alignment`."""


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one rank steps.

    tensor: which of the rank's flat tensors it lies in. group: the param group of that. at: where it begins there.
    start, count: the range of elements of the parameter, row-major; count is 0 where the rank owns nothing of it.
    """

    named: NamedParam
    tensor: int
    group: int
    at: int
    start: int
    count: int


def groups(scenario: Scenario) -> list[list[NamedParam]]:
    """The trainable parameters of each param group that has some, in the order in which the optimizer is given them."""
    params = [p for p in model_spec(scenario.model).unique_params if p.spec.trainable == "yes"]
    if scenario.optimizer.groups == "one":
        return [params]
    numbers = sorted({p.spec.group for p in params})
    return [[p for p in params if p.spec.group == number] for number in numbers]


def pieces(scenario: Scenario, mesh: Mesh, rank: int) -> tuple[Piece, ...]:
    """What a rank owns of every trainable parameter, in the order in which it lies there."""
    return _own_parts(scenario, mesh, rank) if scenario.sharding == "fully_shard" else _shares(scenario, mesh, rank)


def whole(scenario: Scenario) -> tuple[Piece, ...]:
    """What a rank has of every trainable parameter where the engine took an optimizer that shards nothing."""
    ordered = [(named, index) for index, group in enumerate(groups(scenario)) for named in group]
    return tuple(Piece(named, tensor, index, 0, 0, named.spec.numel) for tensor, (named, index) in enumerate(ordered))


def _shares(scenario: Scenario, mesh: Mesh, rank: int) -> tuple[Piece, ...]:
    """Stages 1 and 2."""
    found: list[Piece] = []
    for index, group in enumerate(groups(scenario)):
        ordered = _dealt(group, mesh.dp) if ROUND_ROBIN in scenario.options else group
        align = _alignment(scenario, ordered[0]) if ALIGNED in scenario.options else 1
        begins = _begins([p.spec.numel for p in ordered], align)
        unit = _START_ALIGNMENT * mesh.dp
        share = -(-(begins[-1] + ordered[-1].spec.numel) // unit) * _START_ALIGNMENT
        low, high = share * rank, share * (rank + 1)
        for named, begin in zip(ordered, begins, strict=True):
            first, end = max(low, begin), min(high, begin + named.spec.numel)
            owned = (first - low, first - begin, end - first) if first < end else (0, 0, 0)
            found.append(Piece(named, index, index, *owned))
    return tuple(found)


def _own_parts(scenario: Scenario, mesh: Mesh, rank: int) -> tuple[Piece, ...]:
    """Stage 3."""
    found: list[Piece] = []
    tensor = -1
    for index, group in enumerate(groups(scenario)):
        at, tensor = 0, tensor + 1
        for number, named in enumerate(group):
            found.append(Piece(named, tensor, index, at, *own_part(named.spec.numel, mesh.dp, rank)))
            at += -(-named.spec.numel // mesh.dp)
            if SUB_GROUPS in scenario.options and at >= SUB_GROUP_SIZE and number + 1 < len(group):
                at, tensor = 0, tensor + 1
    return tuple(found)


def own_part(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """`(start, count)` of the part of a parameter that a rank has under stage 3."""
    part = -(-numel // ranks)
    start = min(part * rank, numel)
    return start, min(part, numel - start)


def _begins(numels: list[int], align: int) -> list[int]:
    """The offset of each tensor in a flat buffer in which every tensor starts at a multiple of `align` elements."""
    begins, end = [], 0
    for numel in numels:
        begins.append(-(-end // align) * align)
        end = begins[-1] + numel
    return begins


def _dealt(group: list[NamedParam], ranks: int) -> list[NamedParam]:
    """A group's parameters dealt out to the ranks in turn, those of the first rank first."""
    return [named for rank in range(ranks) for named in group[rank::ranks]]


def _alignment(scenario: Scenario, named: NamedParam) -> int:
    """The elements that a parameter's beginning is aligned to under `parameter_alignment`."""
    return _ADDRESS_ALIGNMENT_BYTES // ITEMSIZE[storage_dtype(scenario.dtype, named.spec)]
