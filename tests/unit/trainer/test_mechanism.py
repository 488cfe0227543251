"""What made two arms differ: each mechanism is recognised by what it makes, and nothing is made of noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.trainer.judge.mechanism import _moves_of, mechanism
from shardproof.trainer.values.pairs import Between
from shardproof.trainer.values.scaled import in_common

Floats = npt.NDArray[np.float32]
Make = Callable[[Floats], Floats]

RNG = np.random.default_rng(0)
BEFORE = {f"{role} {name}": RNG.standard_normal((4, 6), np.float32)
          for role in ("param", "exp_avg") for name in ("a", "b")}  # fmt: skip
RIGHT = {name: (before + RNG.standard_normal(before.shape, np.float32)) for name, before in BEFORE.items()}


def values(arrays: dict[str, Floats]) -> dict[tuple[str, str], Value]:
    found = {}
    for name, array in arrays.items():
        role, _, fqn = name.partition(" ")
        found[role, fqn] = Value("fp32", array.shape, array.astype(np.float32).tobytes())
    return found


def told(wrong: dict[str, Floats], ranks: int = 2, against: str = "", right: dict[str, Floats] = RIGHT,
         **more: Any) -> str:  # fmt: skip
    differences = [
        Difference(Key(3, "live", *key), "bits", total=24, mismatched=24)
        for key, value in values(wrong).items() if value != values(right)[key]
    ]  # fmt: skip
    return mechanism(differences, Between(values(right), values(wrong), values(BEFORE), ranks, against, **more))


def everywhere(make: Make) -> dict[str, Floats]:
    return {name: make(right) for name, right in RIGHT.items()}


def as_bf16(array: Floats) -> Floats:
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda x: np.concatenate([x[:, :1], x[:, 2:4], x[:, 1:2], x[:, 4:]], 1), "of a along dim 1: 0, 2, 3, 1, 4, 5"),
        (lambda x: np.concatenate([x[2:], x[:2]]), "another order, of a along dim 0: the 2 chunks in reverse"),
        (lambda x: np.ascontiguousarray(x.T).reshape(x.shape), "another order, of a with dims 0 and 1 exchanged"),
        (as_bf16, "rounded to bf16 on the way"),
        (np.zeros_like, "All of these values are zeros."),
    ],
)
def test_what_was_done_to_the_right_values_is_recognised(make: Make, sentence: str) -> None:
    assert sentence in told(everywhere(make))


@pytest.mark.parametrize("back", [False, True])
def test_memory_that_was_read_without_regard_to_its_strides_is_recognised(back: bool) -> None:
    right = RNG.standard_normal((2, 3, 4, 4), np.float32)
    turned = right.reshape(2, 4, 4, 3).transpose(0, 3, 1, 2) if back else right.transpose(0, 2, 3, 1)
    wrong = np.ascontiguousarray(turned).reshape(right.shape)
    difference = Difference(Key(3, "live", "param", "a"), "bits", total=right.size, mismatched=right.size)
    between = Between(values({"param a": right}), values({"param a": wrong}), {}, 2)
    assert mechanism([difference], between) == (
        "The elements are the right ones in another order, of a with dims in the order 0, 2, 3, 1, as memory format "
        "channels_last has them: look at a transpose, and at what takes or fills a tensor's memory without regard to "
        "its strides."
    )


def test_where_nobody_knows_which_side_is_right_a_mechanism_says_against_what_it_measures() -> None:
    wrong = everywhere(lambda x: np.concatenate([x[2:], x[:2]]))
    assert told(wrong, against="offload=none").startswith("Measured against offload=none: the elements are the right ")
    assert told(everywhere(np.zeros_like), against="a=b") == "Measured against a=b: all of these values are zeros."
    one = {**RIGHT, "param a": RIGHT["param a"] + np.float32(1)}
    assert told(one, against="a=b") == told(one) == ""


def test_values_of_other_tensors() -> None:
    swapped = {"param a": RIGHT["param b"], "param b": RIGHT["param a"]}
    assert told({**RIGHT, **swapped}) == "The values are those of other tensors: a has that of b."


def test_values_of_other_tensors_that_were_rounded_on_the_way() -> None:
    found = told({**RIGHT, "param a": RIGHT["param b"].astype(np.float16).astype(np.float32)})
    assert found == "The values are those of other tensors: a has that of b, rounded to fp16."


def test_most_of_the_values_are_those_of_other_tensors() -> None:
    right = {f"param {side}{number}": RNG.standard_normal((4, 6), np.float32) for side in "ab" for number in range(5)}
    wrong = {name: right[f"param b{name[-1]}"] for name in right}
    wrong["param a4"] = right["param a4"] + 1
    differences = [Difference(Key(3, "live", *key), "bits", total=24, mismatched=24)
                   for key, value in values(wrong).items() if value != values(right)[key]]  # fmt: skip
    between = Between(values(right), values(wrong), {}, 2)
    assert mechanism(differences, between).startswith(
        "The values are those of other tensors: a0 has that of b0 (4 of 5 tensors)."
    )


def test_values_of_the_same_parameter() -> None:
    swapped = {f"{role} {name}": RIGHT[f"{other} {name}"] for name in ("a", "b")
               for role, other in (("param", "exp_avg"), ("exp_avg", "param"))}  # fmt: skip
    assert told(swapped) == "The values are those of other tensors: param of a has its exp_avg."


@pytest.mark.parametrize("factor", [0.5, 1.058, 2.0**-16, 1024.0])
def test_one_factor_on_every_change(factor: float) -> None:
    wrong = {name: BEFORE[name] + np.float32(factor) * (right - BEFORE[name]) for name, right in RIGHT.items()}
    assert told(wrong).startswith(f"Every change of exp_avg is {factor:.4g} times what it should be, in all tensors")


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_factor_that_is_the_number_of_ranks(factor: float) -> None:
    wrong = {name: BEFORE[name] + np.float32(factor) * (right - BEFORE[name]) for name, right in RIGHT.items()}
    assert "Look at what adds up over the ranks" in told(wrong, ranks=4)
    assert "Look at what adds up over the ranks" not in told(wrong, ranks=3)


def test_a_factor_on_some_tensors_alone() -> None:
    """Where others are right, what scales all gradients is not the reason."""
    wrong = {name: BEFORE[name] + 8 * (right - BEFORE[name]) if name.endswith("a") else right
             for name, right in RIGHT.items()}  # fmt: skip
    sentence = told({name: value for name, value in wrong.items() if name.startswith("exp_avg")})
    assert "is 8 times what it should be, in 1 of 2 tensors (a), and right in the others: look at what" in sentence


def test_a_factor_that_is_that_of_the_learning_rates() -> None:
    def changed(by: dict[str, float]) -> dict[str, Floats]:
        changes = {name: RIGHT[name] - BEFORE[name] for name in RIGHT}
        return {name: BEFORE[name] + by.get(name, 1) * changes[name] for name in RIGHT}

    stepped: tuple[dict[str, tuple[int, float]], ...] = (
        {"a": (0, 0.1), "b": (1, 0.1)}, {"a": (0, 0.6), "b": (1, 0.1)}, {"a": (0, 0.6), "b": (0, 0.2)},
    )  # fmt: skip
    few = changed({"param a": 6})
    assert told(few, against="n=1", step=1, earlier=1, stepped=stepped[:2]) == (
        "Measured against n=1: every change of param is 6 times that with n=1, in 1 of 2 tensors (a), and right in the "
        "others, at step 1 and at none before it, as is the learning rate of their param group: 0.6 in the place of "
        "0.1 in this step. Look at what sets the rate of that group, such as a schedule."
    )
    assert told(few, stepped=(stepped[0], stepped[0])).endswith(
        "their moments are right, and so are their gradients: look at what the optimizer makes of them, such as the "
        "learning rate, a bias correction, or a term of the update."
    )
    assert told(changed({"param a": 6, "param b": 2}), stepped=(stepped[0], stepped[2])).endswith(
        "times in the others, as are their learning rates: 0.6 in the place of 0.1 and 0.2 in the place of 0.1 in this "
        "step. Look at what sets the rate of that group, such as a schedule, and at what sorts parameters into groups."
    )


def test_a_factor_that_is_the_ratio_of_two_ways() -> None:
    wrong = {name: BEFORE[name] + 4 * (right - BEFORE[name]) for name, right in RIGHT.items()}
    assert "the ratio of the axis' two values. Look at" in told(wrong, against="micro=4", ratio=0.25)
    assert "ratio" not in told(wrong, against="micro=4", ratio=0.5)
    some = {name: value for name, value in wrong.items() if name == "exp_avg a"} | {"exp_avg b": RIGHT["exp_avg b"]}
    assert "(a), and right in the others, which is the ratio" in told(some, against="ep=1", ratio=4.0)


def test_a_tensor_without_a_gradient_is_not_right_for_that() -> None:
    wrong = {name: BEFORE[name] + 4 * (right - BEFORE[name]) for name, right in RIGHT.items()}
    still = {"exp_avg still": np.zeros((4, 6), np.float32)}
    assert "4 times what it should be, in all tensors alike" in told({**wrong, **still}, right={**RIGHT, **still})


def test_gradients_that_are_right_at_the_end_of_the_model_alone() -> None:
    noise = np.random.default_rng(1).standard_normal((4, 6), np.float32)
    first, last = ({**RIGHT, f"exp_avg {name}": noise} for name in ("a", "b"))
    assert told(first, step=1).endswith("look at the gradient that the backward hands on from b to what is before it.")
    assert told(last, step=1).endswith("and a the right ones: look at what the backward does to those alone.")
    assert told(first) == "", "where no step is, no gradient is"


@pytest.mark.parametrize("by", [1, -3])
def test_elements_of_a_flat_buffer_that_was_cut_elsewhere(by: int) -> None:
    flat = np.concatenate([RIGHT[f"exp_avg {name}"].reshape(-1) for name in ("a", "b")])
    moved = np.zeros_like(flat)
    places = np.arange(len(flat))
    inside = (places - by >= 0) & (places - by < len(flat))
    moved[inside] = flat[places[inside] - by]
    a, b = (part.reshape(4, 6) for part in np.split(moved, 2))
    sentence = told({**RIGHT, "exp_avg a": a, "exp_avg b": b})
    assert f"the right ones, {'1 place further on' if by == 1 else '3 places further to the front'}, if" in sentence


def text(words: str) -> Value:
    return Value("utf8", (len(words),), words.encode())


ADAM = {("setting", "group0.betas"): text("(float 0.9, float 0.999)"), ("setting", "group0.params"): text("a\nb")}
GRADIENT = {name: RNG.standard_normal((4, 6), np.float32) for name in ("a", "b")}


def adam(factors: dict[str, float]) -> dict[str, Floats]:
    """Parameters and moments after a step of Adam in the middle of a run, whose gradients are off by factors."""
    moments = {name: np.float32(0.9) * BEFORE[f"exp_avg {name}"] + np.float32(0.1 * factor) * GRADIENT[name]
               for name, factor in factors.items()}  # fmt: skip
    return {f"exp_avg {name}": moment for name, moment in moments.items()} | {
        f"param {name}": BEFORE[f"param {name}"] - moment / (1 + np.abs(moment)) for name, moment in moments.items()
    }


def under_adam(a: float, b: float, settings: dict[tuple[str, str], Value] = ADAM, **more: Any) -> str:
    return told(adam({"a": a, "b": b}), right=adam({"a": 1, "b": 1}), settings=settings, **more)


@pytest.mark.parametrize("factor", [0.5, 3.0, 1.058])
def test_the_gradients_of_adam_are_worked_out_from_its_moments(factor: float) -> None:
    every = f"Every gradient that the optimizer was given is {factor:.4g} times what it should be, in all tensors alike"
    assert under_adam(factor, factor, ranks=5).startswith(f"{every}: look at what scales gradients as a whole")
    assert under_adam(factor, factor, step=3, earlier=2).startswith(f"{every}, at step 3 and at none before it: look ")
    assert "gradient" not in under_adam(factor, factor, {})


def test_gradients_of_adam_that_are_off_in_some_tensors_alone() -> None:
    assert "is 2 times what it should be, in 1 of 2 tensors (b), and right in the others: look" in under_adam(1, 2)
    assert "is 2 times what it should be in 1 of 2 tensors (a), and 0.5 times in the others: look" in under_adam(2, 0.5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.1, 1.0]))
def test_no_factor_is_made_of_noisy_gradients(seed: int, noise: float) -> None:
    right, made = adam({"a": 1, "b": 1}), np.random.default_rng(seed)
    wrong = {name: right[name] + np.float32(0.1 * noise) * made.standard_normal((4, 6), np.float32) for name in right}
    assert not told(wrong, right=right, settings=ADAM)


def test_what_tensors_have_in_common() -> None:
    assert in_common(["a.bias", "b.bias"], ["a.weight"]) == " (all that are called bias)"
    assert in_common(["a.bias", "a.weight", "b.weight"], ["c.weight"]) == " (all of a and b)"
    assert in_common(["a.bias", "a.weight"], ["b.bias"]) == " (all of a)"
    assert in_common(["a.bias", "b.weight"], ["b.bias"]) == " (a.bias, b.weight)"


def test_parameters_that_do_not_move() -> None:
    wrong = {name: BEFORE[name] if name.startswith("param") else right for name, right in RIGHT.items()}
    assert told(wrong).startswith("Parameters should change here, and none does")
    one = {**RIGHT, "param a": BEFORE["param a"]}
    assert told(one).startswith("1 of 2 parameters should change here, and do not")
    assert told(one, loaded=True) == "", "a load moves no parameters"


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("none", "no gradient arrives (`.grad` is None when the optimizer steps)."),
        ("gradient", "so look at what undoes its step, or at whether they are too small to change anything."),
        ("", "look at what skips a step, and at gradients that are zero or do not arrive."),
    ],
)
def test_why_parameters_do_not_move_leaves_out_what_was_seen_otherwise(word: str, why: str) -> None:
    settings = {("setting", "group0.lr"): text("float 0.1")}
    sentence = told({**RIGHT, "param a": BEFORE["param a"]}, settings=settings, gradients={"a": word})
    assert sentence.endswith(why)


def test_parameters_that_move_and_should_not() -> None:
    right = {**RIGHT, "param a": BEFORE["param a"]}
    assert "1 of 2 parameters change here, and should not. Look at weight" in told(RIGHT, right=right)
    frozen = told(RIGHT, right=right, gradients={"a": "frozen"})
    assert "should not: they are frozen (`requires_grad` is False). Look at weight decay" in frozen


def test_a_factor_of_each_ranks_own() -> None:
    factors = np.repeat(np.array([[1.001], [0.1]], np.float32), 2, axis=0)
    wrong = {name: BEFORE[name] + factors * (right - BEFORE[name]) for name, right in RIGHT.items()}
    assert "1.001 times in those of rank 0, 0.1 times in those of rank 1" in told(wrong)
    assert not told(wrong, ranks=3)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_nothing_is_made_of_noise(seed: int, ranks: int) -> None:
    noise = np.random.default_rng(seed)
    assert not told(everywhere(lambda x: x + 0.1 * noise.standard_normal(x.shape, np.float32)), ranks)


def test_nothing_is_said_where_something_else_differs_too_or_too_little() -> None:
    difference = Difference(Key(3, "live", "step", "a"), "missing", total=1, mismatched=1)
    assert not mechanism([difference], Between(values(RIGHT), values(RIGHT), {}, 2))
    one = {name: right.copy() for name, right in RIGHT.items()}
    one["param a"][0, 0] += 1
    assert not told(one)


def test_elements_that_each_ranks_part_of_a_flat_buffer_has_moved_by_its_own_number() -> None:
    flat = np.arange(64, dtype=np.float32)
    parts = [flat[16 * rank : 16 * rank + 16] for rank in range(4)]
    got = np.concatenate(
        [parts[0], *(np.roll(flat, by)[16 * rank : 16 * rank + 16] for rank, by in enumerate((1, 2, 3), 1))]
    )
    assert _moves_of(flat, got, 4) == (0, 1, 2, 3)
    assert _moves_of(flat, flat[::-1].copy(), 4) == ()
    assert _moves_of(flat, np.roll(flat, 2), 4) == (2,)


def test_a_factor_is_measured_where_the_change_is_small_beside_the_parameter() -> None:
    """As of SGD with a small rate, whose change rounding alone makes less exact than a factor has to be."""
    wrong = {
        name: BEFORE[name] + (RIGHT[name] - BEFORE[name]) * np.float32(0.5e-5)
        for name in BEFORE
        if name.startswith("param")
    }
    right = {name: BEFORE[name] + (RIGHT[name] - BEFORE[name]) * np.float32(1e-5) for name in wrong}
    assert "is 0.4999 times what it should be, in all tensors alike: one by the number" in told(wrong, right=right)
    tiny = {name: BEFORE[name] + (RIGHT[name] - BEFORE[name]) * np.float32(1e-7) for name in wrong}
    assert "times what" not in told(tiny, right=right), "rounding has made most of it"


@pytest.mark.parametrize(("factor", "by"), [(7 / 8, "8 in the place of 7"), (8 / 7, "7 in the place of 8")])
def test_a_variance_that_is_divided_by_another_number(factor: float, by: str) -> None:
    before = values({"buffer v": np.linspace(1, 2, 6)})
    batch = RNG.random(6)
    one, other = (values({"buffer v": 0.9 * np.linspace(1, 2, 6) + 0.1 * share * batch}) for share in (1.0, factor))
    wrong = [Difference(Key(3, "live", "buffer", "v"), "bits", total=6, mismatched=6)]
    assert mechanism(wrong, Between(one, other, before, 1)) == (
        f"What v takes in is {factor:.6g} times what it should be, as of a variance that is divided by {by}."
    )
    odd = values({"buffer v": RNG.random(6)})
    assert mechanism(wrong, Between(one, odd, before, 1)) == ""


def momenta(factor: float, rate: float) -> str:
    """What is said of momenta that take up a gradient times a factor, beside parameters that are right."""
    gradients = {name: RNG.standard_normal((4, 6)) for name in "ab"}
    before = values({f"momentum {name}": np.ones((4, 6)) for name in gradients})
    one, other = (
        values({f"momentum {name}": 0.9 + share * gradient for name, gradient in gradients.items()})
        for share in (1.0, factor)
    )
    wrong = [Difference(Key(3, "live", "momentum", name), "bits", total=24, mismatched=24) for name in gradients]
    settings = {("setting", "group0.momentum"): text("float 0.9")}
    settings |= {("setting", "group0.params"): text("a\nb")}
    stepped = dict.fromkeys(gradients, (0, rate))
    return mechanism(wrong, Between(one, other, before, 1, settings=settings, stepped=(stepped, stepped)))


def test_momenta_that_keep_updates_in_the_place_of_gradients() -> None:
    said = momenta(0.05, 0.05)
    assert said.startswith(
        "What every momentum takes up of its gradient is 0.05 times what it should be, which is the "
    )
    assert "they go on at the old rate for some steps when a schedule sets another one." in said
    assert "and no parameter differs: look at what is put into it, and at" in momenta(0.5, 0.05)
