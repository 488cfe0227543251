"""Which step's data a step was given, and counts in which two ways are not alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from shardproof.observe.logical import Value
from shardproof.observe.record import Record
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.trainer.data.given import (
    always_the_same,
    by_values,
    data_apart,
    given_by_op,
    of_another_step,
    other_data,
    repeats,
    rows_apart,
    rows_by_op,
)
from shardproof.trainer.rank.inputs import Inputs
from shardproof.trainer.step.model_calls import model_calls_by_op
from shardproof.trainer.values.checkpoints import held_under, numbers_held
from shardproof.trainer.values.counted import with_counted
from shardproof.trainer.values.every_mesh import of_both
from shardproof.trainer.values.notes import buffers_stay_zero, stays_zero
from shardproof.trainer.values.pairs import Between, Pair
from shardproof.trainer.values.plain import every_step_skipped
from shardproof.trainer.values.scaled import scaled
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = {0: {0: "a", 1: "b"}, 1: {0: "c", 1: "d"}, 2: {0: "e", 1: "f"}, 3: {0: "g", 1: "h"}}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({0: "e", 1: "f"}, ""),
        ({}, ""),
        ({0: "c", 1: "d"}, "what it was given in step 1 of the uninterrupted run: these samples come once more."),
        ({0: "e", 1: "h"}, "given in step 3 of the uninterrupted run: the samples of step 2 are left out."),
        ({0: "f", 1: "e"}, "rank 0 was given what rank 1 was given in step 2 of the uninterrupted run."),
        ({0: "x", 1: "f"}, "rank 0 was given what it was given in no step of the uninterrupted run"),
    ],
)  # fmt: skip
def test_the_step_is_named_whose_data_they_are(given: dict[int, str], told: str) -> None:
    found = other_data(given, 2, STEPS)
    assert told in found if told else found == ""


def test_a_microbatch_is_found_in_another_step() -> None:
    steps = {0: {0: ("a", "b")}, 1: {0: ("c", "d")}, 2: {0: ("e", "f")}}
    told = "rank 0 was given first what the uninterrupted run was given in call 2 of its model in step 1."
    assert told.replace("rank 0", "the model") in other_data({0: ("d", "e")}, 2, steps)
    assert "in no step" in other_data({0: ("x", "e")}, 2, steps)
    one = other_data({0: ("b",)}, 2, steps)
    assert "in call 2 of its model in step 0; the model was called 1 times in it, and 2" in one


def test_the_data_of_another_step_are_told_from_those_of_another_rank() -> None:
    ways = "loader=own", "loader=lite"
    first = {0: {0: "a", 1: "b"}, 1: {0: "c", 1: "d"}}
    told = of_another_step({0: "c", 1: "x"}, 0, first, ways)
    assert told.startswith(
        "The data differ: in step 0 rank 0 was given with loader=lite what rank 0 was given in step 1"
    )
    assert of_another_step({0: "b", 1: "b"}, 0, first, ways) == "", "ranks share data out otherwise"
    assert of_another_step({0: "x"}, 0, first, ways) == ""


def test_the_first_of_several_calls_may_be_the_same() -> None:
    steps = {0: {0: ("a", "b")}, 1: {0: ("c", "d")}}
    assert "in no step" in other_data({0: ("a", "x")}, 0, steps)


def test_a_loader_that_begins_anew_in_each_step_is_told() -> None:
    assert always_the_same({step: {0: "a", 1: "b"} for step in range(4)}).startswith("all 4 steps are given the same")
    assert always_the_same({0: {0: "a"}, 1: {0: "a"}}) == always_the_same({step: {} for step in range(4)}) == ""
    assert always_the_same({step: {0: step} for step in range(4)}) == ""


class Small(nn.Module):
    """Takes no more than two rows at once."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Give them back."""
        if len(rows) > 2:
            raise MemoryError("too many rows")
        return rows * torch.ones(1, requires_grad=True)


class Tree(nn.Module):
    """Calls itself, as a model of trees does."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """All rows, and the first of them as a branch."""
        leaf: torch.Tensor = self.leaf(rows)
        return leaf + self(rows[:1], depth - 1) if depth else leaf


def test_a_model_that_calls_itself_is_called_once() -> None:
    inputs, model = Inputs(), Tree()
    with inputs.watched():
        for rows in torch.arange(8.0).reshape(4, 2).chunk(2):
            model(rows).sum().backward()
    calls = model_calls_by_op([inputs.record(0, 0)])[0][0]
    assert [len(call.rows) for call in calls] == [2, 2]


def test_a_call_that_raised_and_was_made_again_does_not_count() -> None:
    inputs, model = Inputs(), nn.Sequential(nn.Identity(), Small())
    with inputs.watched():
        with pytest.raises(MemoryError):
            model(torch.ones(4, 2))
        for rows in torch.arange(8.0).reshape(4, 2).chunk(2):
            model(rows).sum().backward()
    calls = model_calls_by_op([inputs.record(0, 0)])[0][0]
    assert [len(call.rows) for call in calls] == [2, 2]


class Reads(nn.Module):
    """Embeds token ids without a module, and calls modules with what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.table[tokens]))
        return found


def inputs_of(*calls: Callable[[], torch.Tensor]) -> list[str]:
    inputs = Inputs()
    with inputs.watched():
        for call in calls:
            call().sum().backward()
    return list(given_by_op([inputs.record(3, 1)])[3][1])  # type: ignore[call-overload]


def test_each_call_of_a_model_has_the_digest_of_its_data() -> None:
    model, a, b = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2), torch.zeros(1, 2)
    one, other, again = inputs_of(lambda: model(a), lambda: model(b), lambda: model(a))
    assert one == again != other
    assert inputs_of(lambda: checkpoint(model, a, use_reentrant=False)) == [one]


def test_rows_of_data_are_counted_over_ranks() -> None:
    records = list[Record]()
    for rank, rows in ((0, 2), (1, 3)):
        inputs = Inputs()
        with inputs.watched():
            nn.Linear(2, 2)(torch.ones(rows, 2))
        records.append(inputs.record(5, rank))
    assert rows_by_op(records) == {5: 5}


@pytest.mark.parametrize(
    ("steps", "alike", "told"),
    [
        (
            {0: (6, 6), 1: (4, 10)},
            True,
            "in step 1 the model was given 4 different rows with a=1 and 10 with a=2, and in step 0 6",
        ),
        ({0: (6, 12), 1: (4, 8)}, False, ""),
        ({0: (6, 12)}, False, ""),
        ({0: (6, 12)}, True, "in step 0 the model was given 6 different rows with a=1 and 12 with a=2: look at"),
        ({0: (6, 6), 1: (0, 10)}, True, ""),
    ],
)
def test_ways_that_are_given_other_numbers_of_rows(
    steps: dict[int, tuple[int, int]], told: str, *, alike: bool
) -> None:
    found = rows_apart(steps, max(steps), ("a=1", "a=2"), alike=alike)
    assert told in found if told else found == ""


def test_what_is_computed_from_parameters_is_no_data() -> None:
    assert inputs_of(lambda: Reads()(torch.tensor([1, 2]))) == []


def test_a_module_that_raises_leaves_nothing_behind() -> None:
    inputs, model = Inputs(), nn.Sequential(nn.Linear(2, 2))
    with inputs.watched():
        with pytest.raises(RuntimeError):
            model(torch.ones(3))
        inputs.record(0, 0)
        model(torch.ones(2))
    assert len(inputs.given) == 1


@pytest.mark.parametrize(
    ("every", "told"),
    [
        ("abab", "step 2 was given the data of step 0 again"), ("abca", "step 3 was given"),
        ("aaaa", ""), ("abcd", ""), ("abba", ""),
    ],
)  # fmt: skip
def test_data_that_come_again_in_the_same_order_are_noted(every: str, told: str) -> None:
    found = repeats({number: {0: one} for number, one in enumerate(every)})
    assert told in found if told else found == ""


def test_what_was_given_is_read_from_values_that_are_data_by_their_name() -> None:
    one = Value("fp32", (1,), b"1234")
    values = {
        (EXTRA_STATE, "rank1.batch.x"): one,
        (EXTRA_STATE, "loader.at"): Value("utf8", (5,), b"int 3"),
        ("param", "w"): one,
    }
    assert by_values(values) == {1: (("batch.x", one),)}


def plain(**numbers: str) -> dict[tuple[str, str], Value]:
    return {(EXTRA_STATE, name): Value("utf8", (len(text),), text.encode()) for name, text in numbers.items()}


@pytest.mark.parametrize(
    ("begun", "one", "other", "results"),
    [
        ("int 0", "int 32", "int 64", True),
        ("float 0.0", "float 1.0", "float 2.0", True),
        ("int 2", "int 2", "int 4", False),
        ("int 0", "int 32", "int 32", False),
        ("str a", "str b", "str c", False),
    ],
)
def test_a_number_that_the_steps_change_is_a_result_and_no_setting(
    begun: str, one: str, other: str, *, results: bool
) -> None:
    ways = plain(seen=one), plain(seen=other)
    both = with_counted(of_both(*ways), ways, (plain(seen=begun), plain(seen=begun)), half=False)
    assert bool(both.one) == results
    assert ((EXTRA_STATE, "seen") in both.settings) == (one != other and not results)


def test_a_number_that_steps_make_and_that_rounds_otherwise_is_alike() -> None:
    ways = plain(norm="float 1.0"), plain(norm="float 1.0000001")
    both = with_counted(of_both(*ways), ways, ({}, {}), half=False)
    assert not both.one
    assert not both.settings
    exact = with_counted(of_both(*ways), ways, ({}, {}), half=False, exactly=True)
    assert not exact.one
    assert exact.settings == {(EXTRA_STATE, "norm")}, "which a note tells"


@pytest.mark.parametrize(
    ("begun", "ended", "told"),
    [({"engine.skipped_steps": "0"}, "4", True), ({"engine.skipped_steps": "0"}, "1", False), ({}, "4", False)],
)
def test_every_step_that_was_skipped_is_told(begun: dict[str, str], ended: str, *, told: bool) -> None:
    found = every_step_skipped(begun, {"engine.skipped_steps": ended}, 4)
    assert ("engine.skipped_steps went up by 4" in found) == told


def test_a_checkpoint_has_a_parameter_under_another_name(tmp_path: Path) -> None:
    saved = {"model.score.weight": torch.arange(6.0), "zeros": torch.zeros(6)}
    torch.save(saved, tmp_path / "model.pt")
    asked = {"score.weight": saved["model.score.weight"], "zero": saved["zeros"], "lost": torch.arange(1.0, 7.0)}
    values = {name: Value("fp32", (6,), tensor.numpy().tobytes()) for name, tensor in asked.items()}
    assert held_under(tmp_path, values) == {"score.weight": "model.score.weight"}
    torch.save({**saved, "score.weight": saved["model.score.weight"]}, tmp_path / "model.pt")
    assert held_under(tmp_path, values) == {}, "it is there under its own name, too"
    (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:-200])
    assert held_under(tmp_path, values) == {}, "nothing is claimed of a damaged one"


def test_a_checkpoint_has_a_number_under_another_name(tmp_path: Path) -> None:
    saved = {"w": torch.arange(6.0), "amp": {"_tracker": 2, "scale": 4.0}, "other": {"scale": 4.0}}
    torch.save(saved, tmp_path / "model.pt")
    asked = {name: Value("utf8", (len(text),), text.encode()) for name, text in
             {"scaler._tracker": "int 2", "scaler.scale": "float 4.0", "scaler.tracker": "int 3"}.items()}  # fmt: skip
    assert numbers_held(tmp_path, asked) == {"scaler._tracker": "amp._tracker = 2"}, "one of `scale` is as good as two"
    (tmp_path / "model.pt").write_bytes(b"damaged")
    assert numbers_held(tmp_path, asked) == {}


def test_data_of_a_rank_that_two_ways_do_not_have_alike_are_told() -> None:
    def at(name: str, *tokens: int) -> dict[tuple[str, str], Value]:
        return {(EXTRA_STATE, name): Value("int64", (1, len(tokens)), np.array(tokens).tobytes())}

    ways = "pad=eos", "pad=0"
    mask = "rank0.batch.mask"
    assert data_apart(at(mask, 1, 1), at(mask, 1, 0), ways) == (
        "The data differ: rank0.batch.mask at [0, 1] is 1 with pad=eos and 0 with pad=0."
    )
    assert "has the shape [1, 2] with pad=eos and [1, 3] with pad=0" in data_apart(
        at(mask, 1, 1), at(mask, 1, 1, 1), ways
    )
    assert data_apart(at(mask, 1), at(mask, 1), ways) == ""
    assert data_apart(at("rank0.seen", 1), at("rank0.seen", 2), ways) == ""


def test_no_factor_is_looked_for_among_buffers_alone() -> None:
    value = [Value("fp32", (2,), np.array(numbers, np.float32).tobytes()) for numbers in ([1, 2], [2, 4])]
    pair = Pair(("buffer", "bias"), value[0], value[1], value[0])
    at = {("buffer", "bias"): value[0]}
    assert scaled([pair], Between(at, at, at, 1)) == ""


def test_buffers_that_are_zero_and_stay_so_are_noted() -> None:
    zero, one = (Value("fp32", (2,), np.array(numbers, np.float32).tobytes()) for numbers in ([0, 0], [0, 1]))
    assert stays_zero([zero, zero])
    assert not stays_zero([zero, one, zero])
    assert not stays_zero([one, one])
    assert not stays_zero([None, zero])
    assert not stays_zero([Value("bool", (2,), b"\0\0")] * 2)
    assert buffers_stay_zero(["moe.expert_bias"]) == "1 buffer is zero and stays so: moe.expert_bias"
    assert buffers_stay_zero(["a", "b", "c", "d"]) == "4 buffers are zero and stay so: a, b, c and 1 more"
