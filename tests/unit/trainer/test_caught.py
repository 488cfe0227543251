"""Exceptions that a step raises and catches."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from line_cases import of_step, written
from shardproof.trainer.lines.caught import caught

SOURCE = """
def loss(batch):
    if not batch:
        raise ValueError("no sample")
    return batch

def step(batches):
    rows = iter(())
    first = next(rows, None)
    for batch in batches:
        try:
            found = loss(batch)
        except ValueError:
            found = 0
    try:
        next(rows)
    except StopIteration:
        rows = None
"""


def test_a_loss_that_raises_and_is_caught_is_told_with_what_comes_next(tmp_path: Path) -> None:
    mine = written(tmp_path, SOURCE)
    assert caught(of_step(partial(mine.step, [1, 0]))).startswith(
        'mine.py:4 (`raise ValueError("no sample")`) raises ValueError in step 0, which is caught, and '
        "mine.py:14 (`found = 0`) comes next: what should have come in between is left out"
    )


def test_the_end_of_an_iterator_is_no_such_case(tmp_path: Path) -> None:
    mine = written(tmp_path, SOURCE)
    assert caught(of_step(partial(mine.step, [1, 2]))) == ""
    assert caught([]) == ""


ANEW = """
from torch.utils.checkpoint import checkpoint

def layer(x, weight):
    return (x * weight).exp()

def step(x, weight):
    checkpoint(layer, x, weight, use_reentrant=False).sum().backward()
    pass
"""


def test_the_end_of_a_forward_that_is_computed_anew_is_no_such_case(tmp_path: Path) -> None:
    mine = written(tmp_path, ANEW)
    assert caught(of_step(partial(mine.step, torch.ones(2), torch.ones(2, requires_grad=True)))) == ""
