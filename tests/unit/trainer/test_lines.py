"""Which statements of a trainer's own files run, what they read and make, and where two runs part by them."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from line_cases import ran, written
from shardproof.program import Op
from shardproof.scenario import Mesh
from shardproof.trainer.lines import (
    BEGINS,
    CHANGED,
    CUT,
    ENDS,
    WRITTEN,
    Moment,
    Statement,
    touched,
    unevenly_reduced,
    unpacked,
)
from shardproof.trainer.lines_apart import apart_in, begin_apart, never_alike, sentence, who_set, wrote_before
from shardproof.trainer.lines_of_ranks import (
    changed_between,
    drawn_by_ranks,
    gradients_otherwise,
    left_alone,
    of_ranks,
    scaled_by_ranks,
    touch_alone,
    touched_by_ranks,
)
from shardproof.trainer.lines_of_state import never_hold, never_holds, of_setting, that_decide, that_ended
from shardproof.trainer.lines_of_ways import of_two_ways
from shardproof.trainer.rank.looked_up import told
from shardproof.trainer.rank.ran import MOST, Ran
from shardproof.trainer.rank.state_calls import StateCalls
from shardproof.trainer.rank.statements import statements_of
from shardproof.trainer.rates_set import rates_set
from shardproof.trainer.readers import read_by
from shardproof.trainer.setters import set_last
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SOURCE = """
class Rows:
    def __init__(self):
        self.position = 0

    def following(self, width):
        rows = list(range(self.position,
                          self.position + width))
        self.position += width
        return rows

def parts(rows, number):
    total = 0.0
    for start in range(number):
        total += rows[start] / number
    return total

def guarded(flag):
    if flag:
        value = "one"
    else:
        value = "other"
    return value

def train(weight, number):
    for _ in range(number):
        (weight.sum() * 2).backward()
    weight.grad.data.div_(number)
    with torch.no_grad():
        weight -= weight.grad
    weight.grad = None

def fails(rows):
    return rows[7]

class Endless:
    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        place = self.seed
        while True:
            yield place
            place += 1

def steps(rows, number):
    for _ in range(number):
        row = next(rows)
    return row

def launch(seed, number):
    rows = iter(Endless(seed))
    return steps(rows, number)

def restore(schedule, kept):
    schedule["last"] = kept["last"]
    schedule["last"] += 1
    kept.get("last")

def entries(held):
    return {"last": held.last, "first": 0}

def read_back(held):
    state = entries(held)
    held.last = state["last"]

def shows(held):
    return held.last

def stops(held):
    if worse(held):
        held.last = 1

def worse(held):
    return held.first >= held.last

def names(held, name):
    setattr(held, name, 2.0)
    return getattr(held, name)

def warms(held, share):
    rate = held.high * share
    return rate

def widens(held):
    held.high = [0.5, held.high][1]
    return held

def draws(held, epoch):
    torch.manual_seed(held.seed + epoch)

def rounds(weight, master, generator):
    noise = torch.rand(3, generator=generator)
    with torch.no_grad():
        weight.copy_(master + noise)
"""


@pytest.fixture
def mine(tmp_path: Path) -> ModuleType:
    """The module of `SOURCE`, from a file of its own."""
    return written(tmp_path, SOURCE)


def ran_with(calls: StateCalls, call: Callable[[], Any]) -> None:
    """Run a call while whose state it asks for is noted."""
    ran(call, Ran(state_calls=calls))


def values(statement: Statement) -> dict[str, str]:
    return {each.path: each.text for each in statement.values}


def step(iteration: int) -> Op:
    return Op(iteration, "step", "", 0, Mesh(), iteration, 0, 0, -1)


def test_statements_know_what_they_read_and_make() -> None:
    found = statements_of('a.b += c[d["e"]]\nfor x in self.rows[index]:\n    pass\nself.seen.append(x)\n')
    shown = {line: ([text for text, _ in one.reads], [text for text, _ in one.makes]) for line, one in found.items()}
    assert shown == {
        1: (["a.b", "c[d['e']]", "d['e']"], ["a.b"]),
        2: (["self.rows[index]", "index"], ["x"]),
        3: ([], []),
        4: (["self.seen", "x"], []),
    }
    assert [text for text, _ in found[4].may_change] == ["self.seen"]
    (by_name,) = statements_of("getattr(self, key).copy_(kept[key])").values()
    assert [text for text, _ in by_name.may_change] == ["self[key]"]


def test_attributes_that_are_named_by_a_value_have_their_names(mine: ModuleType) -> None:
    held = SimpleNamespace(rate=1.0)
    statements = unpacked(ran(partial(mine.names, held, "rate")))
    assert [values(one) for one in statements if one.kind == ENDS] == [{"held.rate": "2.0"}]
    assert [values(one)["held.rate"] for one in statements if "held.rate" in values(one)] == ["2.0", "2.0"]


def test_two_ways_tell_who_set_what_is_not_alike(mine: ModuleType) -> None:
    ways = list[tuple[dict[int, bytes], list[Moment]]]()
    for high in (0.1, 0.2):
        held = SimpleNamespace(high=high)
        first, last = ran(partial(mine.widens, held)), ran(partial(mine.warms, held, 0.5))
        ways.append(({0: last}, [Moment(step(0), {0: first}), Moment(step(1), {0: last})]))
    (one, before), (other, its) = ways
    said = of_two_ways(one, other, ("with n=1", "with n=2"), moments=(before, its))
    assert "makes `rate` = 0.05 with n=1 and 0.1 with n=2 (with n=2 out of `held.high` = 0.2, `share` = 0.5)" in said
    assert "There `held.high` is 0.1 with n=1 and 0.2 with n=2. mine.py:" in said
    assert "(`held.high = [0.5, held.high][1]`) set it last in both, in step 0." in said


def test_what_a_load_writes_out_of_something_else_than_a_step_is_told(mine: ModuleType) -> None:
    weight, master = torch.zeros(3, requires_grad=True), torch.ones(3)

    def rounded(seed: int) -> dict[int, bytes]:
        record = Ran(lambda: {id(weight): ref(weight)})
        generator = torch.Generator().manual_seed(seed)
        return {0: ran(partial(mine.rounds, weight, master, generator), record, {id(weight): "w"})}

    saves, loads = [Moment(step(0), rounded(1))], [Moment(replace(step(0), kind="load"), rounded(2))]
    said = wrote_before({"w"}, (saves, loads), ("the run that saves", "the load"), 0)
    assert (
        "(`weight.copy_(master + noise)`) wrote them in step 0 too, out of the same `master` and of another `noise`."
        in (said)
    )
    assert said.endswith("set it last in both, out of `generator`, a generator whose state is not the same.")
    assert wrote_before({"v"}, (saves, loads), ("one", "other"), 0) == ""
    assert wrote_before({"w"}, (saves, saves), ("one", "other"), 0) == ""


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


def test_the_number_that_a_line_scales_by_is_measured(mine: ModuleType) -> None:
    weight = torch.arange(1.0, 9.0, requires_grad=True)
    data = ran(partial(mine.train, weight, 2), Ran(lambda: {id(weight): ref(weight)}), {id(weight): "w"})
    scaled = {touch.place: touch.scaled for touch in touched(data) if touch.scaled}
    assert list(scaled.values()) == [[2.0], [0.5]]
    assert "backward()" in next(iter(scaled))


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


def test_ranks_that_draw_from_other_seeds_are_told(mine: ModuleType) -> None:
    rows = [ran(partial(mine.draws, SimpleNamespace(seed=seed), 1)) for seed in (7, 8)]
    told = drawn_by_ranks([Moment(step(0), dict(enumerate(rows)))])
    assert told.startswith("Of the lines that draw, mine.py:")
    assert told.endswith(
        "(`torch.manual_seed(held.seed + epoch)`) has `held.seed`, which is 7 on rank 0 and 8 on rank 1."
    )
    assert drawn_by_ranks([Moment(step(0), {0: rows[0], 1: rows[0]})]) == ""


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


def test_statements_that_decide_are_told(mine: ModuleType) -> None:
    said = that_decide({0: ran(partial(mine.guarded, True))}, "save")
    assert said == "In `save`, mine.py:19 (`if flag:`) reads `flag` = True."


def test_what_is_added_to_is_read_too() -> None:
    (found,) = set(statements_of("self.updates += 1").values())
    assert [text for text, _ in found.reads] == [text for text, _ in found.makes] == ["self.updates"]


def test_a_statement_of_several_lines_runs_once(mine: ModuleType) -> None:
    rows = mine.Rows()
    lines = [(one.line, one.kind, values(one)) for one in unpacked(ran(partial(rows.following, 2)))]
    assert lines == [
        (7, BEGINS, {"self.position": "0", "width": "2"}), (7, ENDS, {"rows": "list [0, 1]"}),
        (9, BEGINS, {"self.position": "0", "width": "2"}), (9, ENDS, {"self.position": "2"}),
        (10, BEGINS, {"rows": "list [0, 1]"}),
    ]  # fmt: skip


def test_what_is_read_otherwise_is_told_with_who_set_it(mine: ModuleType) -> None:
    rows, others, record = mine.Rows(), mine.Rows(), Ran()
    before, now = (ran(partial(rows.following, 2), record) for _ in range(2))
    resumed = ran(partial(others.following, 2))
    apart = apart_in({0: now}, {0: resumed})
    assert apart is not None
    moments = [Moment(step(0), {0: before}), Moment(step(1), {0: now})], [Moment(step(1), {0: resumed})]
    said = sentence(*apart, ("the one", "the other"), moments)
    assert said.endswith(
        "in step 1, on rank 0: it reads `self.position`, which is 2 in the one and 0 in the other. In the one mine.py:9"
        " (`self.position += width`) set it last, in step 0."
    )


def test_a_value_that_a_load_passes_on_is_followed_to_what_made_it(mine: ModuleType) -> None:
    held = SimpleNamespace(last=0)
    load = Moment(replace(step(0), kind="load"), {0: ran(partial(mine.read_back, held))})
    there = SimpleNamespace(last=0)
    saves = Moment(step(0), {0: ran(partial(mine.restore, there.__dict__, {"last": 2}))})
    ends = [Moment(step(1), {0: ran(partial(mine.shows, each))}) for each in (there, held)]
    found = apart_in(ends[0].ran, ends[1].ran)
    assert found is not None
    said = sentence(*found, ("the one", "the other"), ([saves, ends[0]], [load, ends[1]]))
    assert said.endswith(
        "(`held.last = state[\"last\"]`) set it last, in `load`, out of `state['last']`, which mine.py:64 "
        "(`state = entries(held)`) made."
    )


def test_what_decides_about_a_flag_is_told(mine: ModuleType) -> None:
    flags = [SimpleNamespace(first=first, last=0) for first in (-1, 3)]
    sets = [Moment(step(0), {0: ran(partial(mine.stops, each))}) for each in flags]
    ends = [Moment(step(1), {0: ran(partial(mine.shows, each))}) for each in flags]
    found = apart_in(ends[0].ran, ends[1].ran)
    assert found is not None
    said = sentence(*found, ("the one", "the other"), ([sets[0], ends[0]], [sets[1], ends[1]]))
    assert "(`held.last = 1`) set it last, in step 0, behind mine.py:" in said
    assert said.endswith("(`return held.first >= held.last`), which read `held.first` = 3 and `held.last` = 0.")


def test_another_turn_is_told(mine: ModuleType) -> None:
    one, other = (ran(partial(mine.guarded, flag)) for flag in ([], [[[[[[1]]]]]]))  # too deep to be told
    said = of_ranks({0: one, 1: other})
    assert said == (
        "Line by line, ranks part, behind mine.py:19 (`if flag:`), where `flag` is [] on rank 0 and "
        '[list [list [list [list [list [1]]]]]] on rank 1: rank 0 goes on with mine.py:22 (`value = "other"`) and '
        'rank 1 goes on with mine.py:20 (`value = "one"`).'
    )
    assert of_ranks({0: one, 1: one}) == ""


def test_what_is_never_alike_is_left_out(mine: ModuleType) -> None:
    one, other = (ran(partial(mine.parts, rows, 1)) for rows in ([1.0], [2.0]))
    leave = never_alike({0: one}, {0: other})
    assert ("mine.py", 15, "total") in leave
    assert apart_in({0: one}, {0: other}, leave) is None
    assert apart_in({0: one}, {0: other}) is not None


def test_two_ways_tell_what_runs_in_one_alone_and_other_numbers(mine: ModuleType) -> None:
    one, other = (ran(partial(mine.train, torch.ones(9, requires_grad=True), number)) for number in (1, 2))
    said = of_two_ways({0: one}, {0: other}, ("with n=1", "with n=2"))
    assert "(`(weight.sum() * 2).backward()`) runs once with n=1 and 2 times with n=2" in said
    assert "(`weight.grad.data.div_(number)`) reads `number` = 1 with n=1 and 2 with n=2" in said
    yes, no = (ran(partial(mine.guarded, flag)) for flag in (True, False))
    said = of_two_ways({0: yes}, {0: no}, ("with n=1", "with n=2"))
    assert "(`value = \"one\"`) makes `value` = 'one' with n=1, and mine.py:22" in said
    assert said.endswith("(`value = \"other\"`) makes `value` = 'other' with n=2.")


def test_who_touches_gradients_and_parameters_is_told(mine: ModuleType) -> None:
    weight = torch.ones(9, requires_grad=True)
    record = Ran(lambda: {id(weight): ref(weight)})
    found = touched(ran(partial(mine.train, weight, 2), record, {id(weight): "weight"}))
    assert [(one.place.partition(" ")[0], dict(one.done)) for one in found] == [
        ("mine.py:27", {"made": ["weight"], "changed": ["weight"]}), ("mine.py:28", {"changed": ["weight"]}),
        ("mine.py:30", {"written": ["weight"]}), ("mine.py:31", {"cleared": ["weight"]}),
    ]  # fmt: skip


def test_where_gradients_come_to_be_others_is_told(mine: ModuleType) -> None:
    one = torch.ones(9, requires_grad=True)
    other = torch.full((9,), 1.0, requires_grad=True)
    other.register_hook(partial(torch.mul, torch.tensor(3.0)))
    rows = [ran(partial(mine.train, weight, 1), Ran(lambda weight=weight: {id(weight): ref(weight)}))
            for weight in (one, other)]  # fmt: skip
    apart = apart_in({0: rows[0]}, {0: rows[1]})
    assert apart is not None
    moments = [Moment(step(3), {0: rows[0]})], [Moment(step(3), {0: rows[1]})]
    assert sentence(*apart, ("the one", "the other"), moments) == (
        "Line by line, the two part at mine.py:27 (`(weight.sum() * 2).backward()`) in step 3, on rank 0: until there "
        "all is alike, as far as it is looked at, and it leaves other gradients in the one than in the other."
    )


def test_a_loop_of_many_statements_is_cut_and_takes_no_other_turn(mine: ModuleType) -> None:
    record = Ran()
    few, many = (ran(partial(mine.parts, [0.0] * 5000, n), record) for n in (1000, 5000))
    assert unpacked(few)[-1].kind == unpacked(many)[-1].kind == CUT
    assert len(unpacked(many)) < 3 * MOST
    assert of_ranks({0: few, 1: many}) == ""


def test_a_generator_that_begins_anew_is_no_turn_and_what_it_reads_is_told(mine: ModuleType) -> None:
    going_on, anew = iter(mine.Endless(0)), iter(mine.Endless(5))
    next(going_on)
    one, other = ({0: ran(partial(mine.steps, rows, 2))} for rows in (going_on, anew))
    apart = apart_in(one, other)
    assert apart is not None
    said = sentence(*apart, ("the one", "the other"), ([Moment(step(1), one)], [Moment(step(1), other)]))
    assert "(`yield place`) in step 1, on rank 0: it reads `place`, which is 1 in the one and 5 in the other." in said
    assert apart_in(one, {0: ran(partial(mine.steps, going_on, 2))}) is not None
    assert (
        apart_in({0: ran(partial(mine.steps, iter([1, 2]), 2))}, {0: ran(partial(mine.steps, iter([1, 2]), 2))}) is None
    )


def test_a_launch_is_read_from_where_it_runs_along(mine: ModuleType) -> None:
    one, other = {0: ran(partial(mine.steps, iter([1, 2]), 2))}, {0: ran(partial(mine.launch, 1, 2))}
    assert apart_in(one, other) is None
    later = {0: ran(partial(mine.launch, 2, 2))}
    apart = apart_in(one, later)
    assert apart is not None
    assert (apart[1].kind, apart[1].first and apart[1].first.path) == ("made", "row")


def test_what_a_sampler_has_behind_it_is_told_where_its_rows_differ(mine: ModuleType) -> None:
    data = TensorDataset(torch.arange(9.0))

    def rows(seed: int) -> Iterator[Any]:
        return iter(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 1, 0, seed=seed)))

    first, second = rows(0), rows(3)
    one, other = ({0: ran(partial(mine.steps, each, 1))} for each in (first, second))
    apart = apart_in(one, other)
    assert apart is not None
    told = apart[1].first
    assert told is not None
    assert (apart[1].kind, told.path, told.text) == ("read", "rows._index_sampler.sampler.seed", "0")


def test_what_a_load_sets_is_told_in_order(mine: ModuleType) -> None:
    weight = torch.zeros(4)
    record = Ran(lambda: {id(weight): ref(weight)})
    data = ran(partial(mine.restore, {"last": 0}, {"last": 8}), record)
    assert of_setting({0: data}, ["schedule.last", "other"], []) == (
        'In `load`, of what is wrong after it: mine.py:56 (`schedule["last"] = kept["last"]`) sets '
        "`schedule['last']` to 8; then mine.py:57 (`schedule[\"last\"] += 1`) sets `schedule['last']` to 9."
    )
    assert of_setting({0: data}, ["other"], []) == of_setting({}, ["schedule.last"], []) == ""


def test_an_error_of_the_trainer_stays_its_own(mine: ModuleType) -> None:
    with pytest.raises(IndexError):
        ran(partial(mine.fails, []))
    assert sys.gettrace() is None or "Ran" not in repr(sys.gettrace())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"), ([1, "a", None], "list [1, 'a', None]"), (torch.tensor(0.5), "tensor 0.5"), (object(), ""),
        (torch.empty(2, device="meta"), ""), (torch.arange(6).reshape(2, 3).to_sparse(), ""), (nn.Linear(1, 1), ""),
        (np.float64(0.5), "0.5"), (np.array(["a"]), ""), (np.zeros(0), ""),
        (np.arange(3), "int64 (3,) [0, 1, 2] 20afc6f5c2aa"),
        ({"a": [1]}, "dict [tuple ['a', list [1]]]"), ([object()], ""), (list(range(101)), ""),
    ],
)  # fmt: skip
def test_plain_values_have_a_text_and_others_none(value: object, text: str) -> None:
    assert told(value) == text


def test_tensors_have_a_digest_of_their_bits() -> None:
    zeros = torch.zeros(2)
    assert told(zeros) == told(zeros.clone())
    assert told(zeros) != told(-zeros)
    freed = torch.zeros(8)[4:]
    freed.untyped_storage().resize_(0)
    assert told(freed) == ""


@pytest.mark.nightly
def test_nothing_of_ours_is_compiled_in_the_midst_of_what_the_trainer_compiles(mine: ModuleType) -> None:
    compiled = torch.compile(mine.parts, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ran(partial(compiled, torch.ones(4), 2))
    assert torch._dynamo.utils.counters["frames"] == {"total": 1, "ok": 1}


def test_parameters_that_are_not_alike_before_are_told_apart_from_what_lines_make(mine: ModuleType) -> None:
    def rows(start: float) -> dict[int, bytes]:
        weight = torch.full((9,), start, requires_grad=True)
        return {0: ran(partial(mine.train, weight, 1), Ran(lambda: {id(weight): ref(weight)}))}

    one, same, other = rows(1.0), rows(1.0), rows(2.0)
    assert not begin_apart(one, same)
    assert begin_apart(one, other)
    assert apart_in(one, same) is None
    assert of_two_ways(one, {0: ran(partial(mine.guarded, 1))}, ("here", "there")).count("runs") == 5


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


def of_step(call: Callable[[], Any]) -> list[Moment]:
    """A step alone, with what ran in it."""
    return [Moment(step(0), {0: ran(call)})]


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


def test_conditions_that_hold_in_neither_way_are_told(tmp_path: Path) -> None:
    module, weight = written(tmp_path, CONDITIONS), torch.ones(2)
    rows = [{0: ran(partial(module.trains, weight, bound))} for bound in (Decimal(1), Decimal(9), Decimal(9))]
    assert (
        never_hold(rows[1:]) == "In neither way this holds in the step: mine.py:12 (`if weight.sum().item() > bound:`)."
    )
    assert never_hold(rows[:2]) == never_hold([{}, rows[1]]) == ""


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
