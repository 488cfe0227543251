"""Where ZeRO keeps what, by our own arithmetic: every element of every parameter has one owner; and what that looks
like on paper."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.models import zoo
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.deepspeed.flat import Piece, groups, pieces

STAGES = ("zero1", "zero2", "fully_shard")
OPTIONS = ("", "round_robin", "parameter_alignment", "parameter_alignment+round_robin", "sub_groups")


def scenario_of(model: str, sharding: str, options: str, dtype: str = "bf16") -> Scenario:
    return Scenario(system="deepspeed", sharding=sharding).with_axes(
        {"model": model, "options": options, "dtype": dtype}
    )


@given(
    model=st.sampled_from(["dense", "short", "many", "tied", "frozen_tower", "groups", "unused"]),
    sharding=st.sampled_from(STAGES), options=st.sampled_from(OPTIONS), ranks=st.integers(1, 9),
    dtype=st.sampled_from(["fp32", "bf16"]),
)  # fmt: skip
def test_every_element_has_one_owner(model: str, sharding: str, options: str, ranks: int, dtype: str) -> None:
    scenario = scenario_of(model, sharding, options, dtype)
    owned: dict[str, list[tuple[int, int]]] = {}
    for rank in range(ranks):
        for piece in pieces(scenario, Mesh(1, ranks, 1), rank):
            owned.setdefault(piece.named.fqn, []).append((piece.start, piece.count))
    assert owned.keys() == {named.fqn for group in groups(scenario) for named in group}
    for fqn, parts in owned.items():
        end = 0
        for start, count in sorted(part for part in parts if part[1]):
            assert start == end
            end += count
        assert end == prod(zoo()[model].param(fqn).spec.shape)


@given(sharding=st.sampled_from(STAGES), options=st.sampled_from(OPTIONS), ranks=st.integers(1, 9))
def test_pieces_of_a_flat_tensor_lie_apart(sharding: str, options: str, ranks: int) -> None:
    for rank in range(ranks):
        places: dict[int, list[tuple[int, int]]] = {}
        for piece in pieces(scenario_of("groups", sharding, options), Mesh(1, ranks, 1), rank):
            if piece.count:
                places.setdefault(piece.tensor, []).append((piece.at, piece.at + piece.count))
        for spans in places.values():
            ordered = sorted(spans)
            assert all(before[1] <= after[0] for before, after in pairwise(ordered))


def shown(found: tuple[Piece, ...]) -> list[tuple[str, int, int, int, int]]:
    return [(p.named.fqn, p.tensor, p.at, p.start, p.count) for p in found]


@pytest.mark.parametrize(
    ("sharding", "options", "expected"),
    [  # the model has 15 elements in first, 12 in odd, 9 in late, 14 in last: 50, padded to 52 for 2 ranks
        ("zero1", "", [("first.weight", 0, 0, 0, 0), ("odd.weight", 0, 0, 11, 1), ("late.weight", 0, 1, 0, 9),
                       ("last.weight", 0, 10, 0, 14)]),
        ("zero1", "round_robin", [("first.weight", 0, 0, 0, 0), ("late.weight", 0, 0, 0, 0),
                                  ("odd.weight", 0, 0, 2, 10), ("last.weight", 0, 10, 0, 14)]),
        ("fully_shard", "", [("first.weight", 0, 0, 8, 7), ("odd.weight", 0, 8, 6, 6), ("late.weight", 0, 14, 5, 4),
                             ("last.weight", 0, 19, 7, 7)]),
    ],
)  # fmt: skip
def test_what_the_second_of_two_ranks_has(sharding: str, options: str, expected: list[object]) -> None:
    assert shown(pieces(scenario_of("resting", sharding, options), Mesh(1, 2, 1), 1)) == expected
