"""What is told of gradients that a backward leaves otherwise in two ways, before a norm over all hides which."""

from __future__ import annotations

import pytest
from shardproof.trainer.step.backward_apart import (
    averaged_apart,
    backward_apart,
    counts_of,
    other_lengths,
    same_lengths,
    some_come_out_alike,
    without_names,
)
from shardproof.trainer.step.measured import Gradient, OfStep
from shardproof.trainer.step.model_calls import Call

WAYS = "split=no", "split=yes"


def step(*lengths: tuple[float, float], sharded: bool = False) -> OfStep:
    """A step that leaves gradients of these lengths, after the backward and before the optimizer."""
    gradients = {
        f"w{place}": Gradient((after**2, after), (before**2, before), sharded, 1)
        for place, (after, before) in enumerate(lengths)
    }
    return OfStep(1, {"SGD": 1}, gradients, ())


def test_every_gradient_is_longer_by_a_count() -> None:
    told = backward_apart({0: step((1, 0.5))}, {0: step((4, 0.5))}, WAYS, {"ranks": 2, "rows of a rank": 4})
    assert told == (
        "The backward leaves every gradient with split=yes 4 times as long as with split=no, which is the number of "
        "rows of a rank."
    )
    told = backward_apart({0: step((4, 0.5))}, {0: step((1, 0.5))}, WAYS, {"ranks": 4})
    assert "0.25 times as long as with split=no, which is one divided by the number of ranks." in told


def test_some_gradients_alone_are_longer() -> None:
    one, other = {0: step((1, 0.5), (2, 1))}, {0: step((1, 0.25), (4, 1))}
    told = backward_apart(one, other, WAYS, {})
    assert told.startswith("The backward leaves with split=yes the gradients of 1 of 2 parameters 2 times as long as")
    assert "split=no: w1. Those of all others are as long in both ways" in told


def test_gradients_of_several_lengths() -> None:
    told = backward_apart({0: step((1, 1), (2, 2))}, {0: step((3, 1), (4, 1))}, WAYS, {})
    assert told == (
        "The backward leaves every gradient with split=yes of another length than with split=no "
        "(w0 3 times, w1 2 times)."
    )


def test_what_is_scaled_after_the_backward() -> None:
    told = backward_apart({0: step((1, 1), (2, 2))}, {0: step((1, 0.5), (2, 1))}, WAYS, {})
    assert "leaves gradients of the same length in both ways, and the optimizer has with split=yes 0.5 times" in told


def test_gradients_that_come_out_alike_though_others_do_not() -> None:
    one, other = {0: step((1, 1), (2, 2))}, {0: step((2, 1), (4, 4))}
    assert some_come_out_alike(one, other, 0.001)
    assert not some_come_out_alike(one, {0: step((2, 2), (4, 4))}, 0.001)
    assert not some_come_out_alike({0: step((0, 0))}, {0: step((0, 0))}, 0.001)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({0: step((1, 1))}, {0: step((1, 1))}),
        ({}, {0: step((1, 1))}),
        ({0: step((1, 1))}, {0: step((2, 1)), 1: step((3, 1))}),  # ranks of which each has its own
        ({0: step((1, 1), (1, 1))}, {0: step((1, 0.5), (1, 0.25))}),
    ],
)
def test_nothing_is_told_of_what_is_alike_or_unknown(one: dict[int, OfStep], other: dict[int, OfStep]) -> None:
    assert backward_apart(one, other, WAYS, {}) == ""


def test_parts_of_sharded_gradients_make_one_length() -> None:
    halves = {rank: step((1, 1), sharded=True) for rank in range(2)}
    assert backward_apart(halves, {0: step((2**0.5, 2**0.5))}, WAYS, {}) == ""


def test_whether_the_backward_leaves_the_same_lengths() -> None:
    assert same_lengths({0: step((1, 1))}, {0: step((1, 2))}, 0.01)
    assert not same_lengths({0: step((1, 1))}, {0: step((2, 1))}, 0.01)
    assert not same_lengths({0: step((1, 1))}, {0: step((1, 1), (1, 1))}, 0.01)
    assert not same_lengths({}, {}, 0.01)
    assert other_lengths({0: step((1, 1))}, {0: step((2, 1))}, 0.01)
    assert not other_lengths({0: step((1, 1))}, {0: step((1, 1))}, 0.01)
    assert not other_lengths({}, {}, 0.01), "what nobody measured is not apart"
    assert without_names({0: step((1, 1), (2, 2))}, {"w1"}) == {0: step((1, 1))}


def test_counts_of_a_step() -> None:
    calls = {rank: [Call(("a", "b", "c"), (0.5, 0.5), False)] for rank in range(2)}
    assert counts_of({0: step(), 1: step()}, calls) == {
        "ranks": 2, "rows of a call": 3, "rows of a rank": 3, "rows of all ranks": 6, "targets of a rank": 2,
        "targets of all ranks": 4,
    }  # fmt: skip


def test_an_average_over_ranks_of_shares_of_one_whole_is_told() -> None:
    def calls(*weights: float) -> dict[int, list[Call]]:
        return {rank: [Call((), (weight,) * 3, False)] for rank, weight in enumerate(weights)}

    one, two = {0: step((4, 4))}, {rank: step((2, 2)) for rank in range(2)}
    told = averaged_apart(one, two, [calls(2.0), calls(1.0, 1.0)])
    assert told.startswith("The losses of all ranks together weigh their targets alike in both ways, by 6 in all, and")
    assert averaged_apart(one, two, [calls(2.0), calls(2.0, 2.0)]) == ""
    assert averaged_apart(one, two, [{0: []}, {0: [], 1: []}]) == averaged_apart({}, {}, [{}, {}]) == ""
    assert averaged_apart(one, {0: step((2, 2))}, [calls(2.0), calls(2.0)]) == ""


def test_each_length_of_its_own_is_no_common_factor() -> None:
    one, other = {0: step((1, 1), (2, 2))}, {0: step((3, 1), (4, 1))}
    assert backward_apart(one, other, WAYS, {}, common=True) == ""
    twice = {0: step((2, 1), (4, 1))}
    assert backward_apart(one, twice, WAYS, {}, common=True).startswith("The backward leaves every gradient with")
    told = backward_apart(one, twice, WAYS, {}, reshaped=1)
    assert told.startswith("The backward leaves the 2 gradients that can be held side by side, with")
