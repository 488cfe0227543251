"""The line of an operation that makes a parameter otherwise on one rank than on another."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from line_cases import ran, written
from shardproof.trainer.lines.lines_of_ranks import made_apart

CLIENT = """
class Client:
    def __init__(self):
        self.weights = torch.zeros(3)

    def fit(self, data):
        self.rows = len(data)
        gradient = data.mean(0)
        self.weights -= 0.5 * gradient
"""


def test_the_first_line_that_makes_a_parameter_otherwise_is_told_with_what_it_reads(tmp_path: Path) -> None:
    mine = written(tmp_path, CLIENT)
    ranks = {rank: ran(partial(mine.Client().fit, torch.full((2, 3), 1.0 + rank))) for rank in (0, 1)}
    assert made_apart(ranks, ["client.weights"]) == (
        "Of the lines of this operation, mine.py:9 (`self.weights -= 0.5 * gradient`) is the first that makes "
        "`self.weights` otherwise on rank 1 than on rank 0, out of `gradient`, and nothing behind it makes them one "
        "again."
    )


def test_where_all_make_the_same_or_another_value_nothing_is_told(tmp_path: Path) -> None:
    mine = written(tmp_path, CLIENT)
    same = {rank: ran(partial(mine.Client().fit, torch.ones(2, 3))) for rank in (0, 1)}
    other = {rank: ran(partial(mine.Client().fit, torch.full((2, 3), 1.0 + rank))) for rank in (0, 1)}
    assert made_apart(same, ["client.weights"]) == made_apart(other, ["client.bias"]) == made_apart({}, ["w"]) == ""
