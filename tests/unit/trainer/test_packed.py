"""Where numbers come that were cut into other rows."""

from __future__ import annotations

import pytest
from shardproof.trainer.data.packed import cut_elsewhere

STEPS = {0: [*range(10, 22)], 1: [*range(30, 42)], 2: [*range(50, 62)]}


def test_numbers_that_come_at_another_place_are_found() -> None:
    assert cut_elsewhere([*range(33, 42), 50, 51, 52], 2, STEPS) == (
        "Its numbers come in that run too, cut into other rows: it begins with what step 1 had from its number 4 on, "
        "9 numbers too early."
    )
    assert cut_elsewhere([*range(54, 62)], 1, STEPS).endswith(
        "what step 2 had from its number 5 on, 16 numbers too late."
    )


@pytest.mark.parametrize(
    "own",
    [
        pytest.param([*range(50, 62)], id="in place"),
        pytest.param([0] * 12, id="filling"),
        pytest.param([*range(70, 82)], id="never"),
        pytest.param([], id="no whole numbers"),
    ],
)
def test_of_others_nothing_is_said(own: list[int]) -> None:
    assert cut_elsewhere(own, 2, STEPS | {3: [0] * 12}) == ""


def test_numbers_that_come_twice_have_no_place() -> None:
    assert cut_elsewhere([*range(33, 42)], 2, STEPS | {3: STEPS[1]}) == ""


def test_windows_of_one_text_that_overlap_by_chance_are_not_told_as_moved() -> None:
    assert cut_elsewhere([*range(33, 40), *range(70, 85)], 2, STEPS) == ""
