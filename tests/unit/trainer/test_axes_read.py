"""Where the value of an axis ends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from line_cases import ran, written
from shardproof.program import Op
from shardproof.scenario import Mesh
from shardproof.trainer.lines.axes_read import axis_read
from shardproof.trainer.lines.statements import Moment

SOURCE = """
def build(self, cell):
    self.temperature = cell.temperature
    self.group = {"decay": cell.decay}

def reads(self):
    soft = torch.ones(()) * 0
    loss = soft * self.temperature
    return loss

def leaves(self):
    loss = torch.ones(())
    return loss
"""


@pytest.mark.parametrize(
    ("step", "axis", "said"),
    [
        ("reads", "temperature", "in a step mine.py:8 (`loss = soft * self.temperature`) reads "
         "`self.temperature` = 2.0 beside `soft` = 0.0 and makes `loss` = 0.0"),
        ("leaves", "temperature", "no line of a step reads it, nor what comes of it in `build`, where mine.py:3 "
         "(`self.temperature = cell.temperature`) reads `cell.temperature` = 2.0 and makes `self.temperature` = 2.0"),
        ("leaves", "decay", "no line of a step reads it, nor what comes of it in `build`, where mine.py:4 "
         "(`self.group = {\"decay\": cell.decay}`) reads `cell.decay` = 0.1 and makes `self.group` = dict [tuple "
         "['decay', 0.1]]"),
        ("leaves", "other", ""),
    ],
)  # fmt: skip
def test_where_the_value_of_an_axis_ends_is_told(tmp_path: Path, step: str, axis: str, said: str) -> None:
    module, trainer = written(tmp_path, SOURCE), SimpleNamespace()
    build = ran(partial(module.build, trainer, SimpleNamespace(temperature=2.0, decay=0.1)))
    data = ran(partial(getattr(module, step), trainer))
    op = Op(0, "step", "", 0, Mesh(), 0, 0, 0, -1)
    moments = [Moment(replace(op, kind="build"), {0: build}), Moment(op, {0: data})]
    assert axis_read(moments, axis, {"temperature": "2.0", "decay": "0.1"}.get(axis, "")) == said
