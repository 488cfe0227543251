"""A count that grows by more in some steps than in others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from line_cases import ran, step, written
from shardproof.trainer.lines.statements import Moment
from shardproof.trainer.lines.uneven import uneven

SOURCE = """
class Mine:
    def __init__(self):
        self.counter = 0

def moves(mine):
    mine.counter += 1

def evaluates(mine):
    moves(mine)

def trains(mine, index):
    moves(mine)
    if index % 2:
        evaluates(mine)
"""


def test_a_count_that_an_evaluation_moves_is_told_with_its_line(tmp_path: Path) -> None:
    module = written(tmp_path, SOURCE)
    mine = module.Mine()
    numbers, steps = [{"counter": "0"}], list[Moment]()
    for index in range(3):
        steps.append(Moment(step(index), {0: ran(partial(module.trains, mine, index))}))
        numbers.append({"counter": str(mine.counter)})
    assert uneven(numbers, steps) == (
        "counter grows by 1, 2, 1 in steps 0 to 2, by more in some than in others: in step 1 mine.py:7 "
        "(`mine.counter += 1`), called by mine.py:10 (`moves(mine)`), sets it, too"
    )
    assert uneven(numbers[:3], steps[:2]) == "", "of few steps"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("counter", ["0", "1", "2", "3"]),
        ("tokens", ["0", "1", "3", "4"]),
        ("counter", ["0", "0", "1", "1"]),  # as of steps that are skipped
        ("counter", ["0.0", "1.0", "3.0", "4.0"]),
    ],
)
def test_nothing_is_told_of_counts_that_grow_evenly_or_count_something_else(name: str, texts: list[str]) -> None:
    assert uneven([{name: text} for text in texts], [Moment(step(at), {}) for at in range(3)]) == ""
