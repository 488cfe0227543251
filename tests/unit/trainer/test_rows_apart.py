"""What the rows or elements have in common in which a value is not alike in two ways to compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from line_cases import ran, written
from shardproof.trainer.lines.first_apart import first_apart

SOURCE = """
def returns(values, rewards, dones, truncated, cut):
    stops = dones + truncated if cut else dones
    ahead = values * (1 - stops)
    target = rewards + 0.5 * ahead

def smoothed(losses, labels, way):
    ignored = labels == -100
    if way:
        losses = losses.masked_fill(ignored, 0.0)
    loss = losses + 0.0

def looked_up(table, row, factor):
    scaled = table.clone()
    scaled[row] = scaled[row] * factor
    held = scaled + 0.0

def each_half(losses, labels, way):
    for part, label in zip(losses.chunk(2), labels.chunk(2)):
        loss = part.masked_fill(label == -100, 0.0) if way else part + 0.0
"""
FLAGS = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
VALUES = torch.arange(1.0, 7.0) / 7
LABELS = torch.tensor([[3, 1, -100], [2, -100, -100], [5, 4, 1], [6, 2, 3]])
NAMES = "with one", "with other"


def told(tmp_path: Path, function: str, *args: object, ways: tuple[object, object]) -> str:
    """The first value apart, of a function that is called in two ways."""
    call = getattr(written(tmp_path, SOURCE), function)
    one, other = ({0: ran(lambda way=way: call(*args, way))} for way in ways)  # type: ignore[misc]
    return first_apart(one, other, NAMES)[0]


@pytest.mark.parametrize(
    ("function", "args", "ways", "common"),
    [
        ("returns", (VALUES, VALUES, *FLAGS), (True, False),
         " (element 3, counted from 0), just where `truncated` is 1 (mine.py:3 "),
        ("smoothed", (torch.arange(1.0, 13.0).reshape(4, 3), LABELS), (True, False),
         " (rows 0 and 1, counted from 0), just where `labels` is -100 (mine.py:8 "),
        ("looked_up", (torch.arange(1.0, 13.0).reshape(6, 2), 2), (1.5, 1.0), " row by row (row 2, counted from 0)"),
        ("each_half", (torch.arange(1.0, 13.0).reshape(4, 3), LABELS), (True, False),
         ", in 2 of 4 rows, just where `labels` is -100 (mine.py:19 "),
    ],
)  # fmt: skip
def test_rows_say_what_they_have_in_common(
    tmp_path: Path, function: str, args: tuple[object, ...], ways: tuple[object, object], common: str
) -> None:
    assert common in told(tmp_path, function, *args, ways=ways)


def test_nothing_is_common_to_all_rows_or_to_others_too(tmp_path: Path) -> None:
    everywhere = told(tmp_path, "looked_up", VALUES[:, None], slice(None), ways=(1.5, 1.0))
    assert everywhere, "all rows are told to be apart"
    assert "just where" not in everywhere
    assert "row" not in everywhere.partition(":")[0]
    labels = LABELS.clone()
    losses = torch.arange(1.0, 13.0).reshape(4, 3)
    losses[0, 2] = 0.0  # so that it is alike where the label is -100, too
    few = told(tmp_path, "smoothed", losses, labels, ways=(True, False))
    assert "in 1 of 4 rows (row 1, counted from 0): " in few
