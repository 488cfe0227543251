"""What a statement does to some elements of a tensor that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from line_cases import ran, written
from shardproof.trainer.lines.edited import edited
from shardproof.trainer.lines.lines_of_ways import of_two_ways
from shardproof.trainer.lines.statements import outlines_of, unpacked

SOURCE = """
def masks(values, ends):
    kept = values * (1 - ends)

def fills(values, ends):
    values = values.masked_fill(ends.bool(), -1.0)

def scales(values, ends):
    kept = values * (1 + ends)

def moves(values, ends):
    kept = values.roll(1)

def either(values, ends, masked):
    if masked:
        kept = values * (1 - ends)
    else:
        kept = values + 0.0 * ends
    return kept
"""
VALUES, ENDS = torch.arange(1.0, 7.0), torch.tensor([0.0, 0, 1, 0, 0, 1])


@pytest.mark.parametrize(
    ("function", "line", "told"),
    [
        ("masks", 3, ", which is `values` but for 2 of 6 elements, which are 0, just where `ends` is 1"),
        ("fills", 6, ", which is what it was but for 2 of 6 elements, which are -1, just where `ends` is 1"),
        ("scales", 9, ""),  # not one number
        ("moves", 12, ""),
    ],
)
def test_elements_that_become_one_number_are_told(tmp_path: Path, function: str, line: int, told: str) -> None:
    data = ran(lambda: getattr(written(tmp_path, SOURCE), function)(VALUES, ENDS))
    assert edited(unpacked(data), outlines_of(data), ("mine.py", line)) == told


def test_of_a_tensor_that_becomes_zero_whole_nothing_is_told(tmp_path: Path) -> None:
    data = ran(lambda: written(tmp_path, SOURCE).masks(VALUES, torch.ones(6)))
    assert edited(unpacked(data), outlines_of(data), ("mine.py", 3)) == ""


def test_of_sums_over_a_third_dimension_nothing_is_told(tmp_path: Path) -> None:
    values, ends = torch.ones(2, 3, 2), torch.zeros(2, 3, 2)
    ends[0, 0] = 1.0
    data = ran(lambda: written(tmp_path, SOURCE).masks(values, ends))
    assert edited(unpacked(data), outlines_of(data), ("mine.py", 3)) == ""


def test_a_mask_of_one_way_alone_is_told_with_its_line(tmp_path: Path) -> None:
    mine = written(tmp_path, SOURCE.replace("kept = values + 0.0 * ends", "other = kept = values + 0.0 * ends"))
    one, other = ({0: ran(lambda way=way: mine.either(VALUES, ENDS, way))} for way in (True, False))  # type: ignore[misc]
    told = of_two_ways(one, other, ("with masked=yes", "with masked=no"))
    assert "runs with masked=yes alone, and makes `kept` = " in told
    assert "which is `values` but for 2 of 6 elements, which are 0, just where `ends` is 1" in told
