"""Statements that set samples against samples by broadcasting."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from line_cases import of_step, written
from shardproof.trainer.lines.broadcast import paired

SOURCE = """
def step(output, target, widen):
    if widen:
        target = target.unsqueeze(1)
    error = (output - target).pow(2)
    return error.mean()
"""


@pytest.mark.parametrize(
    ("output", "target", "widen", "made"),
    [((8, 1), (8,), False, (8, 8)), ((8, 1), (8, 1), True, (8, 8, 1)), ((8,), (8, 1), False, (8, 8))],
)
def test_a_dimension_too_many_or_too_few_is_told(
    tmp_path: Path, output: tuple[int, ...], target: tuple[int, ...], widen: bool, made: tuple[int, ...]
) -> None:
    mine = written(tmp_path, SOURCE)
    said = paired(of_step(partial(mine.step, torch.rand(output), torch.rand(target), widen)))
    wide = [8, 1, 1] if widen else [*target]
    by = " (mine.py:4 (`target = target.unsqueeze(1)`))" if widen else ""
    assert said == (
        f"mine.py:5 (`error = (output - target).pow(2)`) makes `error` of {[*made]} out of `output` of {[*output]} and "
        f"`target` of {wide}{by} in step 0: unless every pair is meant, one of them has a dimension too many or too few"
    )


@pytest.mark.parametrize(
    ("output", "target"),
    [((8, 1), (8, 1)), ((8, 4), (4,)), ((8, 1), (4,)), ((8, 1, 3), (1, 8, 3)), ((1, 1), (1,))],
)
def test_what_is_meant_so_is_not(tmp_path: Path, output: tuple[int, ...], target: tuple[int, ...]) -> None:
    mine = written(tmp_path, SOURCE)
    assert paired(of_step(partial(mine.step, torch.rand(output), torch.rand(target), False))) == ""
