"""Which conditions decide, and who gave a value, as lines that ran say it."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from line_cases import of_step, ran, step, written
from shardproof.trainer.lines.lines_apart import apart_in, sentence, who_set
from shardproof.trainer.lines.lines_of_state import never_hold, never_holds, numbers_made, that_ended
from shardproof.trainer.lines.lines_of_ways import of_two_ways
from shardproof.trainer.lines.readers import read_by
from shardproof.trainer.lines.setters import set_last
from shardproof.trainer.lines.statements import (
    Moment,
    unpacked,
)
from shardproof.trainer.rank.ran import Ran

CONDITIONS = """
def kept(state, names):
    found = {}
    for name in names:
        if name + ".bias" in state:
            found[name] = state[name + ".bias"]
    if "optimizer" in state:
        found["optimizer"] = state["optimizer"]
    return found

def trains(weight, bound):
    if weight.sum().item() > bound:
        weight = weight * 0.5
    return weight
"""


def test_conditions_of_a_save_that_never_hold_are_told(tmp_path: Path) -> None:
    module, state = written(tmp_path, CONDITIONS), {"layer.bias": 1.0}
    rows = [ran(partial(module.kept, state, names)) for names in (("base.layer", "head"), ("layer",))]
    assert never_holds({0: rows[0]}, "save") == (
        "In `save`, this never holds: mine.py:5 (`if name + \".bias\" in state:`), which read `name` = 'base.layer', "
        "'head'; mine.py:7 (`if \"optimizer\" in state:`)."
    )
    assert "mine.py:5" not in never_holds({0: rows[1]}, "save")


def test_what_an_if_decides_is_told(tmp_path: Path) -> None:
    module, weight = written(tmp_path, CONDITIONS), torch.ones(2)
    ways = [ran(partial(module.trains, weight, bound)) for bound in (Decimal(1), Decimal(9))]
    said = of_two_ways({0: ways[0]}, {0: ways[1]}, ("with n=1", "with n=2"), moments=([], []))
    assert "mine.py:13 (`weight = weight * 0.5`) runs with n=1 alone" in said
    assert said.endswith("behind mine.py:12 (`if weight.sum().item() > bound:`), which holds with n=1 alone.")
    told = apart_in({0: ways[0]}, {0: ways[1]})
    assert told is not None
    moments = tuple([Moment(step(1), {0: row})] for row in ways)
    assert sentence(0, told[1], ("the run", "the other"), (moments[0], moments[1])).endswith(
        "it holds in the run and not in the other, though what it reads is alike as far as it is looked at."
    )


SET_ELSEWHERE = """
class Rows:
    def __init__(self, rows):
        self.rows = rows

    def scaled(self, index):
        row = self.rows[index]
        row *= 0.5
        return row

    def share(self, table):
        if table:
            return table[0]
        return self.rows.shape[0] / 8

def train(rows, indices, table):
    share = rows.share(table)
    total = 0.0
    for index in indices:
        total = rows.rows.sum() * share
        rows.scaled(index)
    return total
"""


def test_a_value_that_a_call_gave_is_followed_into_its_return(tmp_path: Path) -> None:
    module = written(tmp_path, SET_ELSEWHERE)
    ways = [of_step(partial(module.train, module.Rows(torch.ones(2, 2)), (0,), table)) for table in ([0.75], [])]
    rows = [unpacked(way[0].ran[0]) for way in ways]
    said = who_set(rows, ("mine.py", 20), "share", ("with n=1", "with n=2"), (ways[0], ways[1]))
    assert said == (
        " mine.py:17 (`share = rows.share(table)`) set it last in both, out of `table`, which is [0.75] in the run "
        "with n=1 and [] in the run with n=2. mine.py:13 (`return table[0]`), which read `table[0]` = 0.75, gave it in "
        "the run with n=1; mine.py:14 (`return self.rows.shape[0] / 8`) gave it in the run with n=2."
    )


def test_a_tensor_that_is_written_in_place_is_told_as_that(tmp_path: Path) -> None:
    module = written(tmp_path, SET_ELSEWHERE)
    rows, ran_of = module.Rows(torch.ones(2, 2)), Ran()
    build = ran(partial(rows.__init__, torch.ones(2, 2)), ran_of)
    data = ran(partial(module.train, rows, (0, 1), [1.0]), ran_of)
    moments = [Moment(replace(step(0), kind="build"), {0: build}), Moment(step(0), {0: data})]
    row = unpacked(data)
    reads = [(at, told) for at, each in enumerate(row) for told in each.values if told.path == "rows.rows"]
    setter = set_last(reads[-1][1], moments, 0, reads[-1][0])
    assert setter is not None
    assert setter.told() == (
        "mine.py:4 (`self.rows = rows`) set it last, in `build`, and something has written into it since, as mine.py:8 "
        "(`row *= 0.5`) may have done"
    )
    first = set_last(reads[0][1], moments, 0, reads[0][0])
    assert first is not None
    assert first.since == ""


def test_conditions_that_hold_in_neither_way_are_told(tmp_path: Path) -> None:
    module, weight = written(tmp_path, CONDITIONS), torch.ones(2)
    ways = [of_step(partial(module.trains, weight, bound)) for bound in (Decimal(1), Decimal(9), Decimal(9))]
    names = "with n=1", "with n=2"
    line = "mine.py:12 (`if weight.sum().item() > bound:`)"
    assert never_hold(ways[1:], names) == f"In neither way this holds in the step: {line}."
    assert never_hold(ways[:2], names) == never_hold([[], ways[1]], names) == ""


FLAGS = """
class Engine:
    def __init__(self, reduces):
        self.reduces, self.last = reduces, True

    def backward(self):
        self.last = False

    def step(self):
        if self.reduces:
            if self.last:
                pass
"""


def test_what_holds_in_every_so_many_steps_is_no_hint(tmp_path: Path) -> None:
    module = written(
        tmp_path, "def step(index):\n    if index % 4 == 0:\n        pass\n    if index > 4:\n        pass\n"
    )
    ways = [of_step(partial(module.step, 1)) for _ in range(2)]
    assert never_hold(ways, ("with n=1", "with n=2")) == (
        "In neither way this holds in the step: mine.py:5 (`if index > 4:`)."
    )


def test_who_set_the_flag_of_a_condition_is_told(tmp_path: Path) -> None:
    module = written(tmp_path, FLAGS)

    def steps(engine: Any) -> None:
        engine.backward()
        engine.step()

    ways = [of_step(partial(steps, module.Engine(reduces))) for reduces in (True, True, False)]
    names = "with n=1", "with n=2"
    flag = "where `self.last` is False, and mine.py:7 (`self.last = False`) set it last, in this step"
    assert never_hold(ways[:2], names).endswith(f": mine.py:11 (`if self.last:`), {flag}.")
    assert never_hold(ways[1:], names) == (
        "In neither way this holds in the step: mine.py:11 (`if self.last:`), to which a run comes with n=1 alone, "
        f"{flag}."
    )


def test_a_line_that_writes_into_a_value_leaves_it_to_be_read(tmp_path: Path) -> None:
    source = "def fills(part):\n    out = torch.zeros(2)\n    out[:1] = part\n    lost = part * 2\n    return out\n"
    row = unpacked(ran(partial(written(tmp_path, source).fills, torch.ones(1))))
    assert [read_by(row, ("mine.py", line)) for line in (3, 5)] == ["", ", which no other line reads"]


def test_the_loop_that_ends_a_run_is_told(tmp_path: Path) -> None:
    source = (
        "def fits(epoch, most):\n    while (epoch < most):\n        epoch += 1\n    if epoch > 9:\n        epoch = 0\n"
    )
    module = written(tmp_path, source)
    assert that_ended({0: ran(partial(module.fits, 2, 3))}) == (
        " The last condition that did not hold: mine.py:3 (`while (epoch < most):`), which read `epoch` = 3 "
        "and `most` = 3."
    )
    assert that_ended({}) == ""


def test_numbers_that_a_load_makes_are_told(tmp_path: Path) -> None:
    source = """
def load(kept, batch):
    done = kept["done"]
    epoch = done // batch
    name = "no number"
    for at in range(2):
        pass
    skip = done % batch
"""
    mine = written(tmp_path, source)
    assert numbers_made({0: ran(lambda: mine.load({"done": 8}, 24))}, "load") == (
        'In `load`, mine.py:3 (`done = kept["done"]`) makes `done` = 8; mine.py:4 (`epoch = done // batch`) makes '
        "`epoch` = 0; mine.py:8 (`skip = done % batch`) makes `skip` = 8."
    )
    assert numbers_made({}, "load") == ""
