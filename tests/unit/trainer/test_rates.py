"""A learning rate that a schedule holds and the optimizer has not, and what is no such thing."""

from __future__ import annotations

import pytest
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.trainer.values.every_mesh import Name
from shardproof.trainer.values.rates import ZERO, of_rates, rates_apart, rates_in, used_rates, used_rates_apart


def line(text: str) -> Value:
    return Value("utf8", (len(text),), text.encode())


OBSERVED = {
    ("setting", "group0.lr"): line("float 1.0"), ("setting", "group1.lr"): line("float 0.0"),
    ("scheduler", "scheduler._last_lr.0"): line("float 0.1"), ("scheduler", "scheduler.last_epoch"): line("int 3"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("role", "name", "expected", "told"),
    [
        ("setting", "group0.lr", "'float 0.1'", True),
        ("setting", "optimizer.group0.lr", "'float 0.1'", True),
        ("setting", "group0.lr", "'float 0.2'", False),
        ("setting", "group1.lr", "'float 0.1'", False),
        ("setting", "group0.weight_decay", "'float 0.1'", False),
        ("scheduler", "scheduler._last_lr.0", "'float 0.1'", False),
    ],
)
def test_a_rate_that_only_the_schedule_holds(role: str, name: str, expected: str, told: bool) -> None:
    difference = Difference(Key(3, "live", role, name), "bits", expected_first=expected, observed_first="'float 1.0'")
    assert ("holds the right rate, 0.1," in of_rates([difference], {}, OBSERVED, {})) is told


def test_rates_are_those_of_groups() -> None:
    assert rates_in(OBSERVED) == {b"float 1.0", b"float 0.0"}
    assert not rates_in({("buffer", "group0.lr"): line("int 0")})
    assert rates_in(OBSERVED) & ZERO


RATE, MOMENT = ("setting", "group0.lr"), ("exp_avg", "w")


@pytest.mark.parametrize(
    ("before", "written"),
    [
        ({RATE: line("float 1.0")}, False),
        ({RATE: line("float 10.0")}, True),
        ({RATE: line("float 1.0"), MOMENT: line("bytes a")}, True),
    ],
    ids=["as-before", "another-than-before", "the-moments-are-loaded"],
)
def test_a_rate_that_was_written_after_the_optimizer_was_loaded(before: dict[Name, Value], written: bool) -> None:
    """A schedule that is built behind the load of the optimizer sets its first rate."""
    difference = Difference(Key(3, "live", *RATE), "bits", expected_first="'float 0.1'", observed_first="'float 1.0'")
    moments = {MOMENT: line("bytes b")} if MOMENT in before else {}
    told = of_rates([difference], moments, OBSERVED | moments, before)
    assert ("built after the optimizer was loaded" in told) is written
    assert ("which has to load its own state too" in told) is not written


@pytest.mark.parametrize(
    ("initial", "told"),
    [("float 10.0", "1.0 = 0.1 · 10.0, which is start_factor times initial_lr:"), ("float 1.0", "its initial_lr, 1.0:"),
     ("float 7.0", "another one: the load wrote it."), ("int 10", "another one: the load wrote it.")],
)  # fmt: skip
def test_the_first_rate_of_a_schedule_is_told_by_its_factor(initial: str, told: str) -> None:
    difference = Difference(Key(3, "live", *RATE), "bits", expected_first="'float 0.1'", observed_first="'float 1.0'")
    more = {("setting", "group0.initial_lr"): line(initial), ("scheduler", "s.start_factor"): line("float 0.1")}
    observed = {key: value for key, value in OBSERVED.items() if not key[1].endswith(".0")} | more
    held = {("scheduler", "s._last_lr.0"): line("float 0.1")}
    assert told in of_rates([difference], {}, observed | held, {RATE: line("float 10.0")})


def test_rates_of_two_ways_are_named_with_their_factor() -> None:
    names = ("how=a", "how=b")
    other = {**OBSERVED, ("setting", "group0.lr"): line("float 0.5")}
    told, factor = rates_apart(OBSERVED, other, names)
    assert (told, factor) == ("The learning rate of group 0 is 1.0 with how=a and 0.5 with how=b.", 0.5)
    assert rates_apart(OBSERVED, OBSERVED, names) == ("", 0.0)
    ones = {("setting", f"group{n}.lr"): line("float 1.0") for n in (0, 1)}
    assert rates_apart(ones, {**ones, ("setting", "group0.lr"): line("float 0.5")}, names)[1] == 0.0


def test_rates_of_a_step_are_those_that_an_optimizer_stepped_with() -> None:
    """They may be set in the step, before it steps and behind."""
    groups = {("setting", "group0.params"): line("a\nb"), ("setting", "group1.params"): line("rank0.c")}
    one = used_rates([0.1, 0.5], {**OBSERVED, **groups})
    assert one == {"a": (0, 0.1), "b": (0, 0.1), "c": (1, 0.5)}
    assert used_rates([0.1], groups) == used_rates([0.1, 0.5], OBSERVED) == {}, "nobody knows whose rate is which"
    assert used_rates([None, 0.5], groups) == {"c": (1, 0.5)}
    names = ("how=a", "how=b")
    assert used_rates_apart(one, one, names) == used_rates_apart(one, {}, names) == ("", 0.0)
    told = "The learning rate of group 0 is 0.1 with how=a and 0.2 with how=b in this step"
    alone = {**one, "d": (2, 0.7)}
    assert used_rates_apart(one, alone, names) == (
        "The learning rate of every parameter of both ways is the same, and that of d, with how=b alone, is 0.7.", 0.0
    )  # fmt: skip
    assert used_rates_apart(one, used_rates([0.2, 0.5], groups), names) == (f"{told}, and that of others the same.", 0)
    assert used_rates_apart(one, used_rates([0.2, 1.0], groups), names) == (f"{told}.", 2.0)
    other = used_rates([0.1], {("setting", "group0.params"): line("a\nb\nc")})
    assert used_rates_apart(one, other, names)[0] == (
        "The learning rate of c is 0.5 with how=a and 0.1 with how=b in this step, and that of others the same."
    )
