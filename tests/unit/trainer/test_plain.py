"""Plain numbers on a trainer that no load brings back: which are looked at, and which are told."""

from __future__ import annotations

import pytest
import torch
from shardproof.trainer.rank.plain import MOST, numbers_of
from shardproof.trainer.values.plain import counted_apart, left_behind, numbers_left_behind


class Meter:
    def __init__(self) -> None:
        self.total, self.count, self._hidden, self.on, self.name = 1.5, 2, 3, True, "meter"


class Holder:
    def __init__(self) -> None:
        self.samples, self._own, self.flag = 8, 1, False
        self.meter, self.best, self.model = Meter(), {"loss": 0.25}, torch.nn.Linear(1, 1)


def test_numbers_of_the_trainer_and_of_its_own_objects_are_looked_at() -> None:
    holder = Holder()
    assert numbers_of(holder, vars(holder)) == {
        "samples": "8", "meter.total": "1.5", "meter.count": "2", "best.loss": "0.25",
    }  # fmt: skip
    holder.best = {str(number): 1.0 for number in range(MOST)}
    assert numbers_of(holder, vars(holder)) == {}


@pytest.mark.parametrize(
    ("fresh", "saved", "again", "loaded", "steps", "told"),
    [
        ("0", "4", "4", "0", [("6", "2")], True),
        ("0", "4", "4", "4", [("6", "6")], False),
        ("4", "4", "4", "4", [("4", "4")], False),
        ("0", "4", "5", "0", [("6", "2")], False),
        ("0", "4", "4", "0", [("6", "6")], False),
        ("0", "4", "4", "0", [], False),
    ],
    ids=["left-behind", "restored", "constant", "not-the-same-twice", "made-anew-by-a-step", "no-steps"],
)
def test_a_number_that_steps_make_and_no_load_brings_back(
    fresh: str, saved: str, again: str, loaded: str, steps: list[tuple[str, str]], told: bool
) -> None:
    pairs = [({"seen": one}, {"seen": other}) for one, other in steps]
    found = left_behind({"seen": fresh}, {"seen": saved}, {"seen": again}, {"seen": loaded}, pairs)
    assert found == ["seen"] * told


def test_few_of_many_are_named() -> None:
    assert "a, b, c, d and 1 more; the resumed run" in numbers_left_behind(["e", "d", "c", "b", "a"])


@pytest.mark.parametrize(
    ("name", "values", "updates", "told"),
    [
        (
            "state.global_step",
            (0, 2, 4),
            1,
            "state.global_step grows by 2 in each step, in which the",
        ),
        ("global_step", (0, 1, 2), 2, "global_step grows by 1 in each step, in which the optimizer makes 2 updates:"),
        ("global_step", (0, 1, 2), 1, ""),
        ("global_step", (0, 0, 0), 1, ""),
        ("global_step", (0, 1, 3), 1, ""),
        ("samples", (0, 8, 16), 1, ""),
        ("num_steps", (0, 2, 4), 0, ""),
    ],
)
def test_a_count_of_steps_that_grows_otherwise_than_the_optimizers(
    name: str, values: tuple[int, ...], updates: int, told: str
) -> None:
    found = counted_apart([{name: str(value)} for value in values], updates)
    assert told in found
    assert bool(told) == bool(found)
