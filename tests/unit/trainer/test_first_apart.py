"""The first value that two ways to compute the same do not have alike, whatever micro-batches, ranks and padding they
have, and what is told of lines that write buffers, or let no gradient through."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from line_cases import ran, written
from shardproof.program import Op
from shardproof.scenario import Mesh
from shardproof.trainer.lines import first_apart as module
from shardproof.trainer.lines import statements as lines
from shardproof.trainer.lines.first_apart import value_alike
from shardproof.trainer.lines.held import CLOSE, Values, is_sum_of_ranks
from shardproof.trainer.lines.lines_of_ranks import built_otherwise, written_otherwise
from shardproof.trainer.lines.lines_of_ways import of_two_ways
from shardproof.trainer.lines.setters import who_set_read
from shardproof.trainer.lines.statements import BUFFERS, RESULT, Moment, Outline, not_held, touched, unpacked
from shardproof.trainer.rank import ran as rank_ran
from shardproof.trainer.rank.outlines import MOST_NUMBERS, outline_of
from shardproof.trainer.rank.ran import Ran
from torch import nn

SOURCE = """
import torch

def total(rows, parts, masked):
    whole = torch.zeros(())
    for part in rows.chunk(parts):
        mask = part != 0 if masked else torch.ones_like(part)
        scores = part * 2.0 + 1.0
        summed = (scores * mask).sum()
        whole = whole + summed
    return whole

def by_loop(rows):
    gains = torch.stack([row * (1 if masked else 1) for row, masked in zip(rows, range(len(rows)))])
    return gains

def by_table(rows, factors):
    gains = rows * factors
    return gains

def choose(rows, factors, table):
    return by_table(rows, factors) if table else by_loop(rows)

def sums(rows):
    if len(rows) > 1:
        one = rows.sum().item()

def means(rows):
    two = rows.mean().item()

def picks(rows, how):
    (sums if how == "sums" else means)(rows)

def mixes(rows, count, parts):
    for part in rows.chunk(parts):
        share = part.sum() / count
        penalty = part.mean()
        loss = share + penalty

def by_column(rows, factors):
    for at in range(rows.shape[1]):
        scaled = rows[:, at] * factors[at]

def at_once(rows, factors):
    scaled = rows * factors

def columns(rows, factors, whole):
    (at_once if whole else by_column)(rows, factors)

def clips(rows, clip):
    if clip:
        clipped = rows * 0.5
        norm = clipped.norm()
    return rows

def widths(factor):
    for width in (2, 3):
        part = torch.arange(1.0, 2.0 * width + 1).reshape(2, width) * torch.tensor([factor] * width)

def shifted(rows, shift):
    return rows[:, :-2], rows[:, shift : shift + 4]

def targets(rows, shift):
    given, wanted = shifted(rows, shift)
    loss = (given - wanted).square().sum()

def grows(held):
    held.tree = held.tree * held.alpha

def stored(held):
    return held.tree

def computed(held):
    return held.tree + held.alpha

def backward(weight, cut):
    if cut:
        held = weight.detach()
    else:
        held = weight
    loss = (held * weight).sum()
    loss.backward()

def averages(module, first):
    if first:
        module.mean.mul_(0.5)
    module.count += 1

def averages_twice(module):
    averages(module, True)
    averages(module, False)

def builds(module, zeroed):
    if zeroed:
        module.mean = torch.zeros(2)
    module.count = torch.ones(1)
"""

HELPED = """
def doubled(value):
    made = value * 2.0
    return made

def layer(rows, pieces, wrong):
    low = doubled(rows)
    for piece in low.chunk(pieces):
        mid = piece + (1.0 if wrong else 0.0)
        out = doubled(mid)
"""

ONE, OTHER = "with parts=1", "with parts=2"
FIRST = " is the first tensor of your own lines that is not alike, over all calls and ranks of this step"
ROWS = torch.arange(1.0, 25.0).reshape(4, 6) / 7


@pytest.fixture
def mine(tmp_path: Path) -> ModuleType:
    return written(tmp_path, SOURCE)


def first_apart(*args: Any, **kwargs: Any) -> str:
    """The sentence alone."""
    return module.first_apart(*args, **kwargs)[0]


def of(call: Callable[[], Any]) -> Mapping[int, bytes]:
    return {0: ran(call)}


def test_other_micro_batches_make_nothing_else(mine: ModuleType) -> None:
    whole, parts = (of(partial(mine.total, ROWS, number, True)) for number in (1, 2))
    assert first_apart(whole, parts, (ONE, OTHER)) == ""


def test_ranks_that_share_the_rows_out_make_nothing_else(mine: ModuleType) -> None:
    ranks = {rank: ran(partial(mine.total, rows, 1, True)) for rank, rows in enumerate(ROWS.chunk(2))}
    assert first_apart(of(partial(mine.total, ROWS, 2, True)), ranks, (ONE, OTHER)) == ""


def test_padding_makes_something_else_where_it_is_not_masked(mine: ModuleType) -> None:
    longer = nn.functional.pad(ROWS, (0, 2))
    masked = [of(partial(mine.total, rows, 1, True)) for rows in (ROWS, longer)]
    assert first_apart(masked[0], masked[1], (ONE, OTHER)) == ""
    bare = [of(partial(mine.total, rows, 1, False)) for rows in (ROWS, longer)]
    said = first_apart(bare[0], bare[1], (ONE, OTHER))
    assert f"`summed`{FIRST}, 109.714 with parts=1 and 117.714 with parts=2: mine.py:" in said
    assert "(`summed = (scores * mask).sum()`) makes it out of what is alike, " in said
    assert "`scores` (whose rows go on, and not with zeros, with parts=2)" in said


def test_rows_of_a_step_may_come_in_any_order(mine: ModuleType) -> None:
    ways = [of(partial(mine.total, rows, 2, True)) for rows in (ROWS, ROWS.flip(0))]
    assert first_apart(ways[0], ways[1], (ONE, OTHER)) == ""
    other = of(partial(mine.total, ROWS.flip(1), 2, True))
    assert f"`rows`{FIRST}" in first_apart(ways[0], other, (ONE, OTHER))


def test_two_lines_that_make_one_name_are_held_side_by_side(mine: ModuleType) -> None:
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    ways = [of(partial(mine.choose, ROWS, factors, table)) for table in (False, True)]
    assert first_apart(ways[0], ways[0], (ONE, OTHER)) == ""
    said = first_apart(ways[0], ways[1], ("with table=no", "with table=yes"))
    assert f"`gains`{FIRST}, 1, 2, 4, 8, 16, 32 times as large with table=yes, column by column: mine.py:" in said
    assert said.endswith("(`gains = rows * factors`) with table=yes.")
    ones = [of(partial(mine.choose, ROWS, torch.ones(6), table)) for table in (False, True)]
    assert first_apart(ones[0], ones[1], ("with table=no", "with table=yes")) == ""


def test_a_sum_beside_a_mean_is_told(mine: ModuleType) -> None:
    ways = [of(partial(mine.mixes, ROWS, torch.tensor(24.0), parts)) for parts in (1, 2)]
    said = first_apart(ways[0], ways[1], (ONE, OTHER))
    assert f"`loss`{FIRST}" in said
    assert said.endswith(
        "(`loss = share + penalty`) reads `share`, of which the sum over all calls and ranks is alike in both ways, "
        "beside `penalty`, of which the mean is."
    )


def test_what_is_made_column_by_column_is_the_same(mine: ModuleType) -> None:
    factors = torch.full((6,), 2.0)
    ways = [of(partial(mine.columns, ROWS, factors, whole)) for whole in (False, True)]
    assert of_two_ways(ways[0], ways[1], (ONE, OTHER)).count("makes `scaled`") == 0
    other = of(partial(mine.columns, ROWS, factors * 2, True))
    assert "makes `scaled`" in of_two_ways(ways[0], other, (ONE, OTHER))


def test_what_a_call_comes_to_and_what_follows_is_told(mine: ModuleType) -> None:
    ways = [of(partial(mine.targets, ROWS, shift)) for shift in (1, 2)]
    said = first_apart(ways[0], ways[1], ("with shift=1", "with shift=2"))
    line = "(`return rows[:, :-2], rows[:, shift : shift + 4]`)"
    assert said.startswith("Result 2 of mine.py:")
    assert f"{line}{FIRST}, reading `shift` = 1 with shift=1 and `shift` = 2 with shift=2." in said
    assert "Behind it follow `wanted`" in said
    assert "`loss`" in said


def test_values_in_other_rows_are_held_side_by_side_as_a_whole(mine: ModuleType) -> None:
    square, flat = ROWS[:, :4], ROWS[:, :4].reshape(1, 16)
    ways = [of(partial(mine.total, rows, 1, True)) for rows in (square, flat)]
    assert first_apart(*ways, (ONE, OTHER)) == ""
    changed = flat.clone()
    changed[0, 7] += 1
    other = of(partial(mine.total, changed, 1, True))
    assert f"`rows`{FIRST}: mine.py:" in first_apart(ways[0], other, (ONE, OTHER)), "its first row is one of the four"


def test_who_set_an_attribute_that_a_line_gives_is_told(mine: ModuleType) -> None:
    held = SimpleNamespace(tree=ROWS, alpha=2.0)
    before, now = (ran(partial(each, held)) for each in (mine.grows, mine.stored))
    computed = ran(partial(mine.computed, held))
    rows = [unpacked(data) for data in (now, computed)]
    places = [next((each.file, each.line) for each in row if each.text.startswith("return")) for row in rows]
    steps = [Op(at, "step", "", 0, Mesh(), at, 0, 0, -1) for at in range(2)]
    first = [Moment(steps[0], {0: before}), Moment(steps[1], {0: now})]
    said = who_set_read(rows, places, (ONE, OTHER), (first, [Moment(steps[1], {0: computed})]))
    assert said.startswith(" In the run with parts=1 mine.py:")
    assert said.endswith("(`held.tree = held.tree * held.alpha`) set `held.tree` last, in step 0.")


def test_matrices_of_several_widths_under_one_name_are_no_error(mine: ModuleType) -> None:
    ways = [of(partial(mine.widths, factor)) for factor in (1.0, 2.0)]
    assert f"`part`{FIRST}" in first_apart(ways[0], ways[1], (ONE, OTHER))


def test_rows_that_come_again_are_no_padding(mine: ModuleType) -> None:
    again = torch.cat([ROWS[2:], ROWS[2:]])
    ways = [of(partial(mine.total, rows, 1, True)) for rows in (ROWS, again)]
    assert f"`rows`{FIRST}, in 2 of 4 rows, of which 2 come again with parts=2" in first_apart(*ways, (ONE, OTHER))


def test_a_value_that_goes_nowhere_is_told(mine: ModuleType) -> None:
    ways = [of(partial(mine.clips, ROWS, clips)) for clips in (False, True)]
    said = of_two_ways(ways[0], ways[1], ("with clip=no", "with clip=yes"))
    assert (
        "(`clipped = rows * 0.5`) runs with clip=yes alone, and makes `clipped` = float32 (4, 6), which mine.py:"
        in said
    )
    assert "(`norm = clipped.norm()`) runs with clip=yes alone, and makes `norm` = 5.0" in said
    assert ", which no other line reads" in said


def test_what_is_never_alike_is_left_out(mine: ModuleType) -> None:
    ways = [of(partial(mine.choose, ROWS, torch.full((6,), factor), True)) for factor in (1.0, 3.0)]
    site = next(iter(first_apart(ways[0], ways[1], (ONE, OTHER)).split("`")[1:2]))
    assert site == "factors"
    leave = {("mine.py", line, path) for line in range(60) for path in ("factors", "gains", RESULT)}
    assert first_apart(ways[0], ways[1], (ONE, OTHER), leave=leave) == ""


def test_a_loss_that_is_alike_may_leave_other_gradients(mine: ModuleType) -> None:
    ways = [of(partial(mine.backward, torch.ones(4, requires_grad=True), cut)) for cut in (False, True)]
    said = value_alike(ways[0], ways[1], ("with cut=no", "with cut=yes"))
    assert said.startswith("`loss` is alike in both ways where mine.py:")
    assert "let no gradient through: with cut=yes, mine.py:" in said
    assert said.endswith("(`held = weight.detach()`).")
    other = of(partial(mine.backward, torch.full((4,), 2.0, requires_grad=True), False))
    assert value_alike(ways[0], other, ("with cut=no", "with cut=yes")) == ""


class Averages(nn.Module):
    """Two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("count", torch.zeros(1))


def test_lines_that_write_buffers_are_told(mine: ModuleType) -> None:
    ways = list[bytes]()
    for first in (False, True):
        module = Averages()
        places = {name: partial(module._buffers.get, name) for name in ("mean", "count")}
        ways.append(ran(partial(mine.averages, module, first), Ran(buffers=lambda places=places: places)))
    assert [touch.done for touch in touched(ways[1])] == [{BUFFERS: ["mean"]}, {BUFFERS: ["count"]}]
    said = written_otherwise(ways[0], ways[1], ["count", "mean"], ("with first=no", "with first=yes"))
    assert said.startswith("In this step, on rank 0, mean is written by no line of yours with first=no and by mine.py:")
    assert said.endswith("(`module.mean.mul_(0.5)`) with first=yes.")
    assert written_otherwise(ways[0], ways[1], ["count"], (ONE, OTHER)) == ""
    twice = ran(partial(mine.averages_twice, module), Ran(buffers=lambda: places))
    assert written_otherwise(ways[1], twice, ["count"], (ONE, OTHER)).endswith(
        "(`module.count += 1`), once with parts=1 and twice with parts=2."
    )


def test_lines_of_build_that_set_a_buffer_in_one_way_are_told(mine: ModuleType) -> None:
    ways = [ran(partial(mine.builds, Averages(), zeroed)) for zeroed in (False, True)]
    said = built_otherwise(ways[0], ways[1], ["0.mean", "0.count"], ("with zeroed=no", "with zeroed=yes"))
    assert said.startswith(
        "In `build`, on rank 0, 0.mean is written by no line of yours with zeroed=no and by mine.py:"
    )
    assert built_otherwise(ways[0], ways[1], ["0.count"], (ONE, OTHER)) == ""


def test_a_conditional_expression_decides_and_what_both_read_alike_does_not(mine: ModuleType) -> None:
    ways = [of(partial(mine.choose, ROWS, torch.ones(6), table)) for table in (False, True)]
    said = of_two_ways(ways[0], ways[1], ("with table=no", "with table=yes"), numbers=False)
    assert said == ""
    ways = [of(partial(mine.picks, ROWS, name)) for name in ("sums", "means")]
    said = of_two_ways(ways[0], ways[1], ("with how=sums", "with how=means"))
    assert "runs with how=sums alone, and makes `one` = 42.8571" in said
    assert "else means)(rows)`), where `how` is 'sums' with how=sums and 'means' with how=means" in said
    assert "if len(rows)" not in said


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (torch.arange(6.0).reshape(2, 3).t(), [0, 3, 1, 4, 2, 5]),
        (torch.ones(2, 2, 3, dtype=torch.bfloat16), [3, 3, 3, 3]),
        (torch.tensor([True, False]), [1, 0]),
        (np.arange(4.0), [0, 1, 2, 3]),
        (torch.tensor(1.0), []),
        (torch.zeros(MOST_NUMBERS + 1), []),
        (torch.zeros(2, 2, device="meta"), []),
    ],
)
def test_outlines_are_the_numbers_of_the_first_two_dimensions(value: Any, numbers: list[float]) -> None:
    assert np.frombuffer(b64decode(outline_of(value)), np.float32).tolist() == numbers


@pytest.mark.parametrize("rolled", [False, True])
def test_pieces_of_rows_are_held_side_by_side(tmp_path: Path, rolled: bool) -> None:
    source = """
def shifts(rows, at, of, shifted):
    part = rows.shape[1] // of
    tokens = rows[:, at * part : (at + 1) * part]
    mine = shifted(rows, tokens)
    return mine.sum()

def before(rows, tokens):
    part = tokens.shape[1]
    at = int((rows[0] == tokens[0, 0]).nonzero()[0, 0])
    return torch.roll(rows, -1, dims=1)[:, at : at + part]

def after(rows, tokens):
    return torch.roll(tokens, -1, dims=1)
"""
    module, rows = written(tmp_path, source), torch.arange(32.0).reshape(2, 16) + 1
    shifted = module.after if rolled else module.before
    one = {0: ran(partial(module.shifts, rows, 0, 1, shifted))}
    other = {rank: ran(partial(module.shifts, rows, rank, 2, shifted)) for rank in range(2)}
    said = first_apart(one, other, ("with cp=1", "with cp=2"))
    assert bool(said) is rolled
    if rolled:
        assert "out of what is alike, `tokens` (each of its rows in 2 pieces with cp=2)" in said


def test_what_is_beyond_a_limit_is_told_not_to_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = written(tmp_path, "def many(number):\n    for at in range(number):\n        made = torch.arange(2.0) + at\n")
    assert not_held({0: ran(lambda: mine.many(3))}) == ""
    assert not_held({0: ran(lambda: mine.many(20_000))}).startswith("Of your own lines the first ")
    monkeypatch.setattr(rank_ran, "MOST_OUTLINES", 4)
    monkeypatch.setattr(lines, "MOST_OUTLINES", 4)
    assert not_held({0: ran(lambda: mine.many(3))}) == ""
    assert not_held({0: ran(lambda: mine.many(9))}).startswith("Lines read and made more than 4 tensors in this step")


def test_the_calls_of_a_helper_are_told_apart_by_who_calls(tmp_path: Path) -> None:
    """What a helper made for its second caller is no cause of what was made before that call."""
    mine = written(tmp_path, HELPED)
    one, other = ({0: ran(partial(mine.layer, ROWS, 1, wrong))} for wrong in (False, True))
    told = module.first_apart(one, other, (ONE, OTHER))[0]
    assert told.startswith(f"`mid`{FIRST}")
    assert "Behind it follow `made`" in told


def test_a_sum_over_ranks_is_called_one() -> None:
    whole, parts = outline([[3.0, 5.0]]), [outline([[1.0, 2.0]]), outline([[2.0, 3.0]])]
    statement = SimpleNamespace()
    mine = Values(statement, [whole], {0: whole})  # type: ignore[arg-type]
    its = Values(statement, parts, dict(enumerate(parts)))  # type: ignore[arg-type]
    assert is_sum_of_ranks(mine, its, CLOSE)
    assert not is_sum_of_ranks(mine, mine, CLOSE)
    same = Values(statement, [whole, whole], {0: whole, 1: whole})  # type: ignore[arg-type]
    assert not is_sum_of_ranks(mine, same, CLOSE), "each rank has the whole"


def outline(rows: list[list[float]]) -> Outline:
    numbers = np.array(rows, np.float32)
    return Outline(numbers.shape, numbers)
