"""What collectives tell of a difference: how often two ways reduce, and what of a step was reduced at all."""

from __future__ import annotations

import json

import pytest
from shardproof.observe.record import Record, whole
from shardproof.trainer.arms import COLLECTIVES
from shardproof.trainer.step.collectives import OfRank, Seen, collectives_by_op, not_reduced, reduced, reductions_apart

BOTH = (0, 1)
WAYS = "chunks=1", "chunks=2"


def of(*rows: tuple[str, int, tuple[int, ...], int], line: str = "loop.py:7") -> OfRank:
    return {(kind, numbers, ranks): Seen(often, line, "Float") for kind, numbers, ranks, often in rows}


def test_collectives_are_counted_over_the_lines_they_come_from() -> None:
    rows = [["all_reduce", 4, [0, 1], "loop.py:7", "Float", 1], ["all_reduce", 4, [0, 1], "loop.py:9", "Float", 2]]
    data = json.dumps(rows).encode()
    record: Record = whole(3, 1, COLLECTIVES, "", "utf8", (len(data),), data)
    assert collectives_by_op([record]) == {3: {1: of(("all_reduce", 4, BOTH, 3))}}


def test_a_tensor_that_is_reduced_more_often_in_one_way() -> None:
    told = reductions_apart({0: of(("all_reduce", 4, BOTH, 1))}, {0: of(("all_reduce", 4, BOTH, 3))}, WAYS)
    assert told.startswith(
        "Rank 0 takes part in all_reduce of 4 numbers among ranks 0, 1 once with chunks=1 and 3 times with chunks=2 "
        "(loop.py:7). A sum that has been reduced counts once more"
    )


def test_a_reduction_that_one_way_lacks() -> None:
    told = reductions_apart({0: of(("all_reduce", 1, BOTH, 1))}, {0: of()}, WAYS)
    assert told == (
        "Rank 0 takes part in all_reduce of 1 number among ranks 0, 1 once with chunks=1 and never with chunks=2 "
        "(loop.py:7)."
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (of(("all_reduce", 4, BOTH, 1)), of(("all_reduce", 4, BOTH, 1))),
        (of(("all_gather", 4, BOTH, 1)), of(("all_gather", 4, BOTH, 3))),  # which sums nothing
        (of(*(("all_reduce", n, BOTH, 1) for n in range(3))), of(("reduce_scatter", 3, BOTH, 1))),  # built otherwise
    ],
)
def test_nothing_is_told_of_ways_that_reduce_alike_or_are_built_otherwise(one: OfRank, other: OfRank) -> None:
    assert reductions_apart({0: one}, {0: other}, WAYS) == ""


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ((), "In this step nothing is reduced over ranks at all."),
        ((("all_gather", 8, BOTH, 1),), "In this step nothing is reduced over ranks at all."),
        ((("all_reduce", 1, BOTH, 1),), "Nothing of 8 numbers or more is reduced in this step; reduced are "
                                        "all_reduce of 1 number among ranks 0, 1 (loop.py:7)."),
        ((("all_reduce", 9, (0,), 1),), "What is reduced in this step with 8 numbers or more, is so among some ranks "
                                        "alone: all_reduce of 9 numbers among rank 0 alone (loop.py:7)."),
        ((("all_reduce", 9, BOTH, 1),), ""),
    ],
)  # fmt: skip
def test_what_was_reduced_in_a_step_that_parts_the_ranks(rows: tuple[tuple[str, int, tuple[int, ...], int], ...],
                                                         told: str) -> None:  # fmt: skip
    assert not_reduced(8, {0: of(*rows), 1: of()}) == told


def test_nothing_is_told_where_collectives_are_not_known() -> None:
    assert not_reduced(8, {}) == not_reduced(8, {0: of()}) == reductions_apart({}, {}, WAYS) == ""


def test_what_a_rank_reduces_in_a_few_words() -> None:
    rows = [("all_gather", 8, BOTH, 1), *(("all_reduce", n, BOTH, n) for n in (1, 2, 3, 4))]
    assert reduced(of(*rows)) == (
        "all_reduce of 1 number among ranks 0, 1 in fp32, once; all_reduce of 2 numbers among ranks 0, 1 in fp32, "
        "twice; all_reduce of 3 numbers among ranks 0, 1 in fp32, 3 times; and 1 more"
    )
