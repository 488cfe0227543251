"""Which gradients, parameters and learning rates lines touch, on several ranks and in two ways."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import ref

import torch
from line_cases import ran, step, written
from shardproof.trainer.lines.lines_of_ranks import (
    changed_between,
    gradients_otherwise,
    left_alone,
    scaled_by_ranks,
    touch_alone,
    touched_by_ranks,
)
from shardproof.trainer.lines.lines_of_ways import of_two_ways
from shardproof.trainer.lines.rates_set import rates_set
from shardproof.trainer.lines.statements import (
    CHANGED,
    WRITTEN,
    Moment,
    touched,
    unevenly_reduced,
)
from shardproof.trainer.rank.ran import Ran


def packed(touched: list[Any], reduced: tuple[Any, ...] = (), scaled: tuple[Any, ...] = ()) -> bytes:
    """What a rank would have recorded of statements that touched parameters or took part in reductions."""
    said = {
        "places": [],
        "ran": [],
        "cut": False,
        "touched": touched,
        "reduced": list(reduced),
        "scaled": list(scaled),
        "rated": [],
        "back": [],
        "regrouped": [],
        "caught": [],
    }
    return zlib.compress(json.dumps(said).encode())


STEPS, SCALES = ["a.py", 3, "p.add_(update)"], ["a.py", 2, "p.grad.div_(2)"]


def test_ranks_that_write_other_parameters_are_told() -> None:
    ranks = {rank: packed([[STEPS, {WRITTEN: names}]]) for rank, names in enumerate((["w", "v"], []))}
    assert touched_by_ranks(ranks) == (
        "Of the lines of this step, a.py:3 (`p.add_(update)`) writes v, w on rank 0 and none on rank 1."
    )
    assert touched_by_ranks({0: ranks[0], 1: ranks[0]}) == ""


def test_lines_that_scale_otherwise_on_one_rank_are_told() -> None:
    ranks = {
        rank: packed([[SCALES, {CHANGED: ["w"]}]], (), ([SCALES, [factor]],)) for rank, factor in enumerate((0.5, 0.25))
    }
    line = "a.py:2 (`p.grad.div_(2)`) multiplies gradients by 0.5 on rank 0 and 0.25 on rank 1"
    assert scaled_by_ranks(ranks) == f"Of the lines of this step, {line}."
    assert scaled_by_ranks({0: ranks[0], 1: ranks[0]}) == ""


SCHEDULES = """
def build(weight, rate):
    optimizer = torch.optim.SGD([weight], 0.5)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer

def step(optimizer, weight, rate):
    weight.grad = torch.ones(2)
    optimizer.step()
    if rate:
        optimizer.param_groups[0]["lr"] = rate
"""


def _ran_with_rate(module: ModuleType, rate: float) -> list[Moment]:
    """A build that sets a rate, and two steps, each of which sets 0.3 when it is over."""
    weight, built = torch.zeros(2), list[torch.optim.Optimizer]()
    record = Ran(lambda: {id(weight): ref(weight)})
    build = ran(lambda: built.append(module.build(weight, rate)), record)
    steps = [ran(lambda: module.step(built[0], weight, 0.3), record, {id(weight): "w"}) for _ in range(2)]
    return [
        Moment(replace(step(0), kind="build"), {0: build}),
        *(Moment(step(at), {0: data}) for at, data in enumerate(steps)),
    ]


def test_lines_that_set_learning_rates_are_told(tmp_path: Path) -> None:
    module = written(tmp_path, SCHEDULES)
    ways = [_ran_with_rate(module, rate) for rate in (0.1, 0.2)]
    rows = [way[0].ran[0] for way in ways]
    assert [[touch.rated for touch in touched(row) if touch.rated] for row in rows] == [
        [[["", "0.5", "0.1"]]], [[["", "0.5", "0.2"]]]
    ]  # fmt: skip
    names = "with n=1", "with n=2"
    assert rates_set(ways[0][:2], ways[1][:2], names)[0] == (
        "The learning rate that this step was made with was set last to 0.1 with n=1 by mine.py:5 "
        '(`group["lr"] = rate`) in `build` and to 0.2 with n=2 by mine.py:5 (`group["lr"] = rate`) in `build`.'
    )
    assert rates_set(*ways, names) == ("", -1)
    assert rates_set(ways[0][:2], ways[1], names)[0].endswith(
        'to 0.3 with n=2 by mine.py:12 (`optimizer.param_groups[0]["lr"] = rate`) in step 0, behind mine.py:11 (`if '
        "rate:`), which read `rate` = 0.3."
    )
    said = of_two_ways({0: rows[0]}, {0: rows[1]}, names, "of `build`")
    assert '(`group["lr"] = rate`) sets the learning rate to 0.1 with n=1 and to 0.2 with n=2' in said


def test_lines_that_leave_some_parameters_alone_or_touch_just_them_are_told() -> None:
    data = packed([[SCALES, {CHANGED: ["w", "w"]}], [STEPS, {WRITTEN: ["w", "v"]}]])
    assert left_alone(data, {"v"}) == (
        "Of the lines of this step, on rank 0: a.py:2 (`p.grad.div_(2)`) changes the gradient of w; and not v."
    )
    assert left_alone(data, {"w"}) == ""
    told = "a.py:2 (`p.grad.div_(2)`) changes the gradient of just those that are otherwise (w), twice"
    assert (touch_alone(data, {"w"}, {"v"}), touch_alone(data, {"v"}, {"w"})) == ([told], [])


def test_lines_that_leave_other_gradients_in_two_ways_are_told() -> None:
    both, alone = (packed([[SCALES, {CHANGED: names}]]) for names in (["w", "v"], ["w"]))
    line = "a.py:2 (`p.grad.div_(2)`) changes gradients, 2 with how=a and 1 with how=b (v)"
    assert (
        gradients_otherwise(both, alone, ("with how=a", "with how=b"))
        == f"Of the lines of this step, on rank 0: {line}."
    )
    assert gradients_otherwise(both, both, ("with how=a", "with how=b")) == ""


def test_lines_that_reduce_in_some_of_their_turns_are_told() -> None:
    data = packed([[STEPS, {WRITTEN: ["w"]}]], ([SCALES, [1, 0, 0]],))
    line = "a.py:2 (`p.grad.div_(2)`) takes part in 1, 0, 0 reductions, in turn"
    assert unevenly_reduced(data) == f"Of the lines of this step, on rank 0: {line}."
    assert unevenly_reduced(packed([], ([SCALES, [1, 1]],))) == ""
    assert [touch.reduced for touch in touched(data)] == [(), [1, 0, 0]]


CLIPS = """
def train(weight, parts, inside):
    for _ in range(parts):
        (weight * weight).sum().backward()
        if inside:
            weight.grad.mul_(0.5)
    if not inside:
        weight.grad.mul_(0.5)
    with torch.no_grad():
        weight.sub_(weight.grad)
"""


def test_gradients_that_are_changed_between_backwards_are_told(tmp_path: Path) -> None:
    module, rows = written(tmp_path, CLIPS), list[bytes]()
    for parts, inside in ((1, True), (3, True), (3, False)):
        weight = torch.ones(8, requires_grad=True)
        record = Ran(lambda weight=weight: {id(weight): ref(weight)})
        rows.append(ran(partial(module.train, weight, parts, inside), record, {id(weight): "w"}))
    names = "with parts=1", "with parts=3"
    assert changed_between(rows[:2], names) == (
        "Between the backwards of this step gradients are changed with parts=3 alone: mine.py:6 "
        "(`weight.grad.mul_(0.5)`), twice. What comes later is added to what that leaves, so that it acts on sums that "
        "are not whole."
    )
    assert changed_between([rows[0], rows[2]], names) == changed_between([None, rows[0]], names) == ""


FEEDS = """
def step(p, own):
    if own:
        first = 1
        second = 2
        rate = 0.25
        p.mul_(rate)
    else:
        p.mul_(0.5)
"""


def test_what_is_read_where_a_wrong_tensor_is_written_comes_before_other_lines(tmp_path: Path) -> None:
    mine, parameter = written(tmp_path, FEEDS), torch.ones(4)
    names = {1: "w"}
    ways = [{0: ran(partial(mine.step, parameter, own), Ran(lambda: {1: lambda: parameter}), names)}
            for own in (True, False)]  # fmt: skip
    said = of_two_ways(ways[0], ways[1], ("with a", "with b"), wrong=["w"])
    assert said.index("(`rate = 0.25`)") < said.index("(`first = 1`)") < said.index("(`second = 2`)")
    said = of_two_ways(ways[0], ways[1], ("with a", "with b"))
    assert said.index("(`first = 1`)") < said.index("(`rate = 0.25`)")
