"""How often two ways updated in a step, by the counts of optimizers and schedules."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.updates import Way, how_often


def way(role: str, name: str, before: int | None, after: int) -> Way:
    """One count before and after a step: a tensor of an optimizer's, or a text of a schedule's."""

    def value(number: int) -> Value:
        words = f"int {number}".encode()
        if role == "step":
            return Value("fp32", (), np.float32(number).tobytes())
        return Value("utf8", (len(words),), words)

    return {} if before is None else {(role, name): value(before)}, {(role, name): value(after)}


@pytest.mark.parametrize(
    ("role", "name", "first", "own", "told"),
    [
        ("step", "w", (None, 2), (None, 1), "At step 0, a=1 updated parameters twice and a=2 once."),
        ("step", "w", (3, 4), (4, 4), "At step 0, a=1 updated parameters once and a=2 not at all."),
        ("step", "w", (3, 4), (4, 5), ""),
        ("scheduler", "scheduler._step_count", (1, 5), (1, 2),
         "At step 0, a=1 moved its learning-rate schedule on 4 times and a=2 once."),
        ("scheduler", "scheduler._step_count", (None, 5), (None, 2), ""),
        ("scheduler", "scheduler.other", (1, 5), (1, 2), ""),
        ("scheduler", "scheduler._step_count", (1, 2), (2, 1), ""),
    ],
)  # fmt: skip
def test_how_often_is_told_where_it_differs(
    role: str, name: str, first: tuple[int | None, int], own: tuple[int | None, int], told: str
) -> None:
    assert how_often(way(role, name, *first), way(role, name, *own), ("a=1", "a=2"), 0) == told
