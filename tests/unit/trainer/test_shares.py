"""Which samples the ranks of one run have in common."""

from __future__ import annotations

import json

import pytest
from shardproof.observe.record import whole
from shardproof.trainer.arms import GIVEN
from shardproof.trainer.data.shares import in_common, shares_by_op, shares_overlap

OWN = {0: {0: ["a", "b"], 1: ["c", "d"]}, 1: {0: ["e", "f"], 1: ["g", "h"]}}


def test_a_step_that_gives_ranks_the_same_is_told_where_no_other_does() -> None:
    assert in_common({0: ["e", "f"], 1: ["f", "e"]}, OWN, 2) == (
        "In step 2 ranks 0 and 1 are given all of their samples in common, and in no step of the uninterrupted run: "
        "look at what gives each rank its share of the data when they go on."
    )
    assert "given 1 of their samples in common" in in_common({0: ["e", "f"], 1: ["f", "g"]}, OWN, 2)
    assert in_common({0: ["g", "h"], 1: ["e", "f"]}, OWN, 1) == "", "of another rank, and not in common"
    both = {0: {0: ["a"], 1: ["a"]}, 1: {0: ["b"], 1: ["b"]}}
    assert in_common({0: ["b"], 1: ["b"]}, both, 1) == "", "as ranks of tensor parallelism are given the same"
    assert in_common({0: ["b"]}, OWN, 1) == ""


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (OWN, ""),
        ({0: {0: ["a", "b"], 1: ["c", "d"]}, 1: {0: ["c", "f"], 1: ["b", "h"]}}, "2 of the same samples in the"),
        ({0: {0: ["a", "b"], 1: ["c", "d"]}, 1: {0: ["c", "f"], 1: ["g", "h"]}}, ""),  # one, as by chance
        ({0: {0: ["a"], 1: ["b"]}, 1: {0: ["b"], 1: ["a"]}, 2: {0: ["a"], 1: ["b"]}}, "2 of the same samples in the"),
        ({0: {0: ["a", "b"], 1: ["c", "d"]}, 1: {0: ["a", "c"], 1: ["b", "d"]}}, ""),  # a second epoch
        ({0: {0: ["a"], 1: ["a"]}, 1: {0: ["b"], 1: ["b"]}}, ""),
        ({0: {0: ["a", "b"]}, 1: {0: ["c", "d"]}}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_ranks_that_take_shares_of_different_orders_are_told(steps: dict[int, dict[int, list[str]]], told: str) -> None:
    text = shares_overlap(steps)
    assert told in text
    assert bool(told) == bool(text)


def test_samples_that_several_ranks_have_are_kept() -> None:
    calls = [
        ["digest", 2, ["a", "b"], [], "", [], False, False, 4, []],
        ["other", 1, ["a"], [], "", [], False, False, 2, []],
    ]
    data = json.dumps(calls).encode()
    records = [whole(3, rank, GIVEN, "", "utf8", (len(data),), data) for rank in (0, 1)]
    assert shares_by_op(records) == {3: {0: ["a", "b", "a"], 1: ["a", "b", "a"]}}
