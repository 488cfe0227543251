"""Which statements of a trainer's own files run, what they read and make, and where two runs part by them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from line_cases import ran, step, written
from shardproof.trainer.lines.lines_apart import apart_in, begin_apart, never_alike, partings, sentence, wrote_before
from shardproof.trainer.lines.lines_of_ranks import (
    drawn_by_ranks,
    of_ranks,
)
from shardproof.trainer.lines.lines_of_state import of_setting, that_decide
from shardproof.trainer.lines.lines_of_ways import of_two_ways
from shardproof.trainer.lines.statements import (
    BEGINS,
    CUT,
    ENDS,
    TOUCHES,
    Moment,
    Statement,
    Told,
    touched,
    unpacked,
)
from shardproof.trainer.rank.looked_up import told
from shardproof.trainer.rank.ran import MOST, Ran
from shardproof.trainer.rank.state_calls import StateCalls
from shardproof.trainer.rank.statements import statements_of
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


def test_the_number_that_a_line_scales_by_is_measured(mine: ModuleType) -> None:
    weight = torch.arange(1.0, 9.0, requires_grad=True)
    data = ran(partial(mine.train, weight, 2), Ran(lambda: {id(weight): ref(weight)}), {id(weight): "w"})
    scaled = {touch.place: touch.scaled for touch in touched(data) if touch.scaled}
    assert list(scaled.values()) == [[2.0], [0.5]]
    assert "backward()" in next(iter(scaled))


def test_ranks_that_draw_from_other_seeds_are_told(mine: ModuleType) -> None:
    rows = [ran(partial(mine.draws, SimpleNamespace(seed=seed), 1)) for seed in (7, 8)]
    told = drawn_by_ranks([Moment(step(0), dict(enumerate(rows)))])
    assert told.startswith("Of the lines that draw, mine.py:")
    assert told.endswith(
        "(`torch.manual_seed(held.seed + epoch)`) has `held.seed`, which is 7 on rank 0 and 8 on rank 1."
    )
    assert drawn_by_ranks([Moment(step(0), {0: rows[0], 1: rows[0]})]) == ""


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


def test_a_launch_knows_no_parameters_at_first() -> None:
    """So that what its first backward does to them is not told, as it is of the run without a break."""
    body = [Statement("mine.py", line, "text", BEGINS, ()) for line in (1, 2, 3)]
    made = Statement("mine.py", 2, "text", TOUCHES, (Told("gradients", "abc", 0),))
    launch = Statement("mine.py", 9, "text", BEGINS, ())
    assert [*partings([*body[:2], made, body[2]], [launch, *body], frozenset())] == []
    assert [each.kind for each in partings([*body[:2], made, body[2]], body, frozenset())] == ["touched"]


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
    assert of_setting({0: data}, dict.fromkeys(["schedule.last", "other"], ""), []) == (
        'In `load`, of what is wrong after it: mine.py:56 (`schedule["last"] = kept["last"]`) sets '
        "`schedule['last']` to 8; then mine.py:57 (`schedule[\"last\"] += 1`) sets `schedule['last']` to 9."
    )
    assert (
        of_setting({0: data}, dict.fromkeys(["other"], ""), [])
        == of_setting({}, dict.fromkeys(["schedule.last"], ""), [])
        == ""
    )


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
