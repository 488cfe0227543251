"""State that never moves while what it should follow does, and param groups that a load gives each other's settings."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.trainer.values.every_mesh import Name
from shardproof.trainer.values.exchanged import exchanged
from shardproof.trainer.values.left_behind import left_behind


def numbers(*values: float) -> Value:
    return Value("fp32", (len(values),), np.array(values, np.float32).tobytes())


MOVING = {("param", "model.0.weight"), ("param", "ema.0.weight"), ("buffer", "model.1.mean")}
STILL = {("buffer", "ema.1.mean"), ("param", "teacher.0.weight")}


def moments(moving: set[Name], still: set[Name], steps: int = 3) -> list[dict[Name, Value]]:
    return [{**{name: numbers(at, 1) for name in moving}, **{name: numbers(0, 1) for name in still}}
            for at in range(steps + 1)]  # fmt: skip


def test_buffers_that_an_average_leaves_behind_are_told() -> None:
    assert left_behind(moments(MOVING, STILL)).startswith(
        "ema.1.mean never moves, while model.1.mean does, and others beside it follow theirs"
    )


@pytest.mark.parametrize(
    ("moving", "still"),
    [
        (MOVING | {("buffer", "ema.1.mean")}, {("param", "teacher.0.weight")}),
        (MOVING - {("param", "ema.0.weight")}, STILL),  # a copy that stays as a whole
        ({("param", "model.0.weight")}, {("buffer", "ema.1.mean")}),
    ],
)
def test_what_follows_or_stays_as_a_whole_is_not(moving: set[Name], still: set[Name]) -> None:
    assert left_behind(moments(moving, still)) == ""


def test_one_step_says_nothing() -> None:
    assert left_behind(moments(MOVING, STILL, 1)) == ""


def setting(number: int) -> Value:
    return Value("utf8", (1,), f"float {number}".encode())


SAVED = {("setting", f"opt.group{at}.{name}"): setting(at) for at in range(2) for name in ("lr", "decay")}


def found(*names: str) -> list[Difference]:
    return [Difference(Key(3, "live", "setting", f"opt.{name}"), "bits", total=1) for name in names]


def test_groups_that_have_the_settings_of_each_other_are_told() -> None:
    after = {name: setting(1 - int(value.data.decode()[-1])) for name, value in SAVED.items()}
    assert exchanged(found("group0.lr", "group1.lr", "group0.decay", "group1.decay"), SAVED, after) == (
        "Groups have the settings of others: opt.group0 those of opt.group1 and opt.group1 those of opt.group0. Look "
        "at the order in which they are put back."
    )
    assert exchanged(found("group0.lr"), SAVED, after) == ""
    other = {**after, ("setting", "opt.group1.lr"): setting(7)}
    assert exchanged(found("group0.lr", "group1.lr", "group0.decay", "group1.decay"), SAVED, other) == ""
