"""A copy of a parameter that is written back some steps later, with the line that does it."""

from __future__ import annotations

from pathlib import Path

import torch
from line_cases import step, written
from shardproof.trainer.lines.lines_of_ranks import written_otherwise
from shardproof.trainer.lines.put_back import put_back
from shardproof.trainer.lines.statements import Moment
from shardproof.trainer.rank.ran import Ran

SOURCE = """
def stepped(p, kept, put):
    p.mul_(2)
    if put:
        p.copy_(kept)
    p.add_(1)
"""


def moments(folder: Path, kept: list[int], *, put: bool = True) -> list[Moment]:
    """Steps that each write what was there after a step, counted from 0, before they add 1."""
    module = written(folder, SOURCE)
    parameter = torch.ones(4)
    record = Ran(lambda: {id(parameter): lambda: parameter})
    states, found = [parameter.clone()], list[Moment]()
    for index, of in enumerate(kept):
        with record.watched():
            module.stepped(parameter, states[of], put)
        found.append(Moment(step(index), {0: record.record(index, 0, {id(parameter): "w"}).data}))
        states.append(parameter.clone())
    return found


def test_a_copy_of_two_steps_ago_is_told(tmp_path: Path) -> None:
    said = put_back(moments(tmp_path, [0, 1, 1]))
    assert said.startswith("mine.py:5 (`p.copy_(kept)`) writes into 1 parameter (w) in step 2 what was there after ")
    assert "after step 0, and gone since: unless a copy that old is meant" in said


def test_a_copy_of_the_step_before_is_what_many_updates_begin_with(tmp_path: Path) -> None:
    assert put_back(moments(tmp_path, [0, 1, 2])) == ""
    assert put_back(moments(tmp_path, [0, 0, 0], put=False)) == ""


def test_two_ways_tell_it_of_the_line_that_one_has_alone(tmp_path: Path) -> None:
    both = [moments(tmp_path, [0, 1, 1], put=put)[-1].ran[0] for put in (True, False)]
    said = written_otherwise(both[0], both[1], ["w"], ("with a", "with b"), {0: "after step 0"})
    assert "mine.py:5 (`p.copy_(kept)`), which writes what was there after step 0, and not later" in said
