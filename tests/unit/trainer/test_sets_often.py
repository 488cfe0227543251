"""A line that sets the learning rate several times in a step."""

from __future__ import annotations

import pytest
from shardproof.trainer.lines.rates_set import sets_often
from shardproof.trainer.lines.statements import Touch


def test_a_schedule_that_is_stepped_for_each_micro_batch_is_told() -> None:
    rated = [("", "0.1", "0.2"), ("", "0.2", "0.30000000000000004")]
    assert sets_often(Touch("mine.py:4 (`scheduler.step()`)", {}, rated=rated)) == (
        "mine.py:4 (`scheduler.step()`) sets the learning rate twice, from 0.1 to 0.3: a schedule that is stepped for "
        "each micro-batch is over sooner than one that counts the optimizer's steps"
    )


@pytest.mark.parametrize(
    "rated",
    [
        pytest.param([], id="none"),
        pytest.param([("", "0.1", "0.2")], id="once"),
        pytest.param([(" of group 0", "0.1", "0.2"), (" of group 1", "0.1", "0.2")], id="each group once"),
        pytest.param([("", "0.1", "0.2"), ("", "0.2", "0.2")], id="to one number"),
    ],
)
def test_other_lines_are_not_told(rated: list[tuple[str, str, str]]) -> None:
    assert sets_often(Touch("mine.py:4", {}, rated=rated)) == ""
