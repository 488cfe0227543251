"""How often two ways updated in a step, by the counts of optimizers and schedules."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.observe.logical import Value
from shardproof.trainer.step.updates import Way, grouped_apart, how_often, optimizers_step, stepped_apart
from shardproof.trainer.values.every_mesh import Name, Values


def way(role: str, name: str, before: int | None, after: int) -> Way:
    """One count before and after a step: a tensor of an optimizer's, or a text of a schedule's."""

    def value(number: int) -> Value:
        words = f"int {number}".encode()
        if role == "step":
            return Value("fp32", (), np.float32(number).tobytes())
        return Value("utf8", (len(words),), words)

    return {} if before is None else {(role, name): value(before)}, {(role, name): value(after)}


@pytest.mark.parametrize(
    ("role", "name", "first", "own", "told"),
    [
        ("step", "w", (None, 2), (None, 1), "At step 0, a=1 updated parameters twice and a=2 once."),
        ("step", "w", (3, 4), (4, 4), "At step 0, a=1 updated parameters once and a=2 not at all."),
        ("step", "w", (3, 4), (4, 5), ""),
        ("scheduler", "scheduler._step_count", (1, 5), (1, 2),
         "At step 0, a=1 moved its learning-rate schedule on 4 times and a=2 once."),
        ("scheduler", "scheduler._step_count", (None, 5), (None, 2), ""),
        ("scheduler", "scheduler.other", (1, 5), (1, 2), ""),
        ("scheduler", "scheduler._step_count", (1, 2), (2, 1), ""),
    ],
)  # fmt: skip
def test_how_often_is_told_where_it_differs(
    role: str, name: str, first: tuple[int | None, int], own: tuple[int | None, int], told: str
) -> None:
    assert how_often(way(role, name, *first), way(role, name, *own), ("a=1", "a=2"), 0) == told


@pytest.mark.parametrize(
    ("epochs", "told"),
    [
        (((4, 5), (0, 1)), ""),  # as of CosineAnnealingWarmRestarts, which never touches its `_step_count`
        (((4, 4), (0, 1)), "At step 4, a=1 moved its learning-rate schedule on not at all and a=2 once."),
        (((4, 4), (3, 1)), ""),
    ],
)
def test_a_schedule_counts_by_both_of_its_numbers(epochs: tuple[tuple[int, int], tuple[int, int]], told: str) -> None:
    counts = way("scheduler", "s._step_count", 0, 0), way("scheduler", "s._step_count", 1, 2)
    lasts = [way("scheduler", "s.last_epoch", *each) for each in epochs]
    both = [({**count[0], **last[0]}, {**count[1], **last[1]}) for count, last in zip(counts, lasts, strict=True)]
    assert how_often(both[0], both[1], ("a=1", "a=2"), 4) == told


def test_a_way_that_moves_parameters_and_counts_no_step_is_not_said_to_have_made_none() -> None:
    moved: list[dict[Name, Value]] = [{("param", "w"): Value("fp32", (), np.float32(n).tobytes())} for n in (1, 2)]
    counts, stays = way("step", "w", 3, 4), way("step", "w", 0, 0)
    both = [({**w[0], **moved[0]}, {**w[1], **moved[1]}) for w in (counts, stays)]
    told = how_often(both[0], both[1], ("a=1", "a=2"), 3)
    assert told == "At step 3, a=2 moves parameters and counts no step: its `step` stays as it is."


def _holding(*names: str) -> dict[Name, Value]:
    params: dict[Name, Value] = {("param", name): Value("fp32", (), b"") for name in ("a", "b")}
    text = "\n".join(names).encode()
    return params | {("setting", "group0.params"): Value("utf8", (len(text),), text)}


@pytest.mark.parametrize(
    ("first", "own", "told"),
    [
        (("b",), ("a", "b"), "With x=2 the optimizer is given a and with x=1 it is not: look at what fills"),
        (("a", "b"), ("b",), "With x=1 the optimizer is given a and with x=2 it is not"),
        (("a", "b"), ("a", "b"), ""),
        (("flat0",), ("a", "b"), ""),
        ((), ("a", "b"), ""),
    ],
)
def test_parameters_that_one_way_alone_gives_its_optimizer(
    first: tuple[str, ...], own: tuple[str, ...], told: str
) -> None:
    found = stepped_apart(_holding(*first), _holding(*own), ("x=1", "x=2"))
    assert found.startswith(told)
    assert bool(found) == bool(told)


def test_parameters_of_another_decay_in_one_way_are_told() -> None:
    def text(words: str) -> Value:
        return Value("utf8", (len(words),), words.encode())

    def grouped(decays: dict[str, str]) -> Values:
        found = dict[Name, Value]()
        for number, (names, decay) in enumerate(decays.items()):
            found["setting", f"group{number}.params"] = text(names.replace(" ", "\n"))
            found["setting", f"group{number}.weight_decay"] = text(f"float {decay}")
        return found

    one, other = grouped({"a b": "0.1", "c": "0.0"}), grouped({"a b c": "0.1"})
    assert grouped_apart(one, other, ("mesh=1", "mesh=2")) == (
        "c has weight_decay 0.0 with mesh=1 and 0.1 with mesh=2, and others the same: look at what sorts parameters "
        "into param groups."
    )
    assert grouped_apart(one, one, ("mesh=1", "mesh=2")) == grouped_apart({}, {}, ("", "")) == ""


def test_optimizers_that_count_nothing_are_told_by_how_often_they_step() -> None:
    assert optimizers_step((1, 2), ("amp=no", "amp=yes"), 3) == (
        "At step 3, optimizers step once with amp=no and twice with amp=yes."
    )
    assert optimizers_step((2, 2), ("amp=no", "amp=yes"), 3) == optimizers_step((0, 2), ("a", "b"), 3) == ""
