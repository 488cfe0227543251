"""What is said of a load after which a trainer has another state: whose it is, what comes first, and what was added."""

from __future__ import annotations

import numpy as np
import pytest
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.trainer.data.given import UNKNOWN
from shardproof.trainer.judge.after_load import Loaded, of_resumed, of_used
from shardproof.trainer.values.every_mesh import Name, Values

PARAM, MOMENT, STEP, RATE = ("param", "w"), ("exp_avg", "w"), ("setting", "group0.step"), ("setting", "group0.lr")
COUNT = ("scheduler", "scheduler.num_steps")


def value(text: str) -> Value:
    return Value("utf8", (len(text),), text.encode())


def state(**texts: str) -> dict[Name, Value]:
    names = {"param": PARAM, "moment": MOMENT, "step": STEP, "rate": RATE, "count": COUNT}
    return {names[key]: value(text) for key, text in texts.items()}


def told(saved: Values, before: Values, after: Values, *earlier: tuple[str, Values]) -> str:
    """The sentence, from what should be there, what was there before the load, and what is after it."""
    found = [
        Difference(Key(7, "live", *name), "bits" if name in after and name in saved else "missing", total=1,
                   expected_first=f"'{saved[name].data.decode()}'",
                   observed_first=f"'{after[name].data.decode()}'" if name in after else "")
        for name in sorted(saved) if after.get(name) != saved[name]
    ]  # fmt: skip
    return of_resumed(found, Loaded(saved, before, after, earlier), after_load=True)


SAVED = state(param="float 3.0", moment="float 2.0", step="int 2")


def test_a_load_that_restores_nothing_is_told_as_that() -> None:
    fresh = state(param="float 0.5")
    assert told(SAVED, fresh, fresh) == (
        "Right after the load everything that `load` should restore is a fresh trainer's: param of w, exp_avg of w, "
        "setting group0.step. param of w is 0.5, and should be 3.0."
    )


@pytest.mark.parametrize(
    ("wrong", "is_told"), [(-7e-38, True), (np.nan, True), (3e30, True), (0.25, False), (0.0, False)]
)
def test_numbers_that_no_training_comes_to_are_told_as_unwritten_memory(wrong: float, is_told: bool) -> None:
    saved, before, after = (
        {PARAM: Value("fp32", (2,), np.array([number, 0.5], np.float32).tobytes())} for number in (0.75, 1.0, wrong)
    )
    found = [Difference(Key(7, "live", *PARAM), "bits", total=2, expected_first="0.75", observed_first=str(wrong))]
    text = of_resumed(found, Loaded(saved, before, after), after_load=True)
    assert ("numbers that no training comes to" in text) is is_told


def test_ranks_that_a_load_leaves_apart_are_named_before_what_a_step_makes_of_them() -> None:
    found = [Difference(Key(7, "live", *PARAM), "bits", total=2, expected_first="0.75", observed_first="0.5")]
    text = of_resumed(found, Loaded({}, {}, {RATE: value("float 0.5")}), after_load=False, disagreed={RATE})
    assert text.startswith("The load leaves ranks apart (setting group0.lr), as `ranks agree` tells, and after a")
    assert "look at what only some ranks load" in text


def test_wrong_parameters_come_before_an_optimizer_that_starts_again() -> None:
    text = told(SAVED, state(param="float 0.5"), state(param="float 2.5", step="int 2"))
    assert text.startswith("Right after the load param of w differs from the run that went on without a break.")
    assert text.endswith("`load` restored no optimizer state (exp_avg of w is missing).")


def test_a_rate_is_named_beside_an_optimizer_that_starts_again() -> None:
    saved = state(param="float 3.0", moment="float 2.0", rate="float 0.1")
    text = told(saved, state(param="float 0.5", rate="float 1.0"), state(param="float 3.0", rate="float 1.0"))
    assert text.startswith("After the resume the optimizer starts again at step 1:")
    assert text.endswith("`load` does not restore setting group0.lr; what is there is a fresh trainer's. "
                         "setting group0.lr is 1.0, and should be 0.1.")  # fmt: skip


def test_a_setting_that_is_missing_before_and_after_is_not_restored() -> None:
    after = state(param="float 3.0", moment="float 2.0")
    assert told(SAVED, state(param="float 0.5"), after) == (
        "`load` does not restore setting group0.step; as in a fresh trainer, nothing is there. setting group0.step is "
        "not "
        "there."
    )


@pytest.mark.parametrize("moment", ["after step 0", "after `build`"])
def test_an_older_state_is_told_with_its_moment(moment: str) -> None:
    older = state(param="float 1.0", moment="float 1.5", step="int 1")
    text = told(SAVED, state(param="float 0.5"), older, ("after step 1", state(param="float 9.0")), (moment, older))
    assert text == (
        f"`load` gives an older state: param of w, exp_avg of w, setting group0.step are what the run had {moment}, "
        "before the save. param of w is 1.0, and should be 3.0."
    )


@pytest.mark.parametrize(
    ("had", "saved", "after", "added"),
    [("int 1", "int 2", "int 3", True), ("int 1", "int 2", "int 1", False), ("int 0", "int 2", "int 4", False),
     ("float 1", "float 2", "float 3", False)],
)  # fmt: skip
def test_a_count_to_which_a_load_adds(had: str, saved: str, after: str, added: bool) -> None:
    difference = Difference(Key(7, "live", *COUNT), "bits", expected_first=f"'{saved}'", observed_first=f"'{after}'")
    text = of_used([difference], state(count=had), state(count=saved), state(count=after))
    assert ("scheduler.num_steps is 3 = 1 + 2: the load adds" in text) is added
    assert not of_used([], {}, {}, {})


def test_moments_that_are_all_zeros_are_an_optimizer_that_starts_again() -> None:
    def moments(number: float) -> dict[Name, Value]:
        return {("exp_avg", name): Value("fp32", (2,), np.full(2, number, np.float32).tobytes()) for name in "wv"}

    def said(after: Values) -> str:
        found = [Difference(Key(7, "live", *name), "bits", total=2, expected_first="0.5", observed_first="0.0")
                 for name in sorted(after) if after[name] != moments(0.5)[name]]  # fmt: skip
        return of_resumed(found, Loaded(moments(0.5), {}, after), after_load=True)

    assert said(moments(0)) == (
        "After the resume the optimizer starts again: `load` restored no optimizer state (exp_avg of 2 parameters are "
        "zeros, as `get_optimizer_state_dict` makes them, or a step without gradients)."
    )
    one = moments(0.5) | {("exp_avg", "w"): moments(0)["exp_avg", "w"]}
    assert "starts again" not in said(one), "one parameter's alone"


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (f"The data differ: in step 2 the model was given what it was given in no step of the run{UNKNOWN}", True),
        ("The data differ: in step 2 the model was given what it was given in step 0 of the uninterrupted run.", False),
    ],
)  # fmt: skip
def test_random_states_that_a_load_leaves_alone_are_told_with_the_data_that_are_drawn(data: str, first: bool) -> None:
    name = ("rng", "rank0.torch")
    saved, fresh = (
        {name: Value("int64", (4,), np.array(row, "<i8").tobytes())} for row in ([0, 4, 0, 0], [1, 0, 0, 0])
    )
    random = [Difference(Key(7, "live", *name), "bits", total=4)]
    found = [Difference(Key(8, "live", *PARAM), "bits", total=2, expected_first="0.75", observed_first="0.5")]
    lost = "Random numbers are drawn from the state of a fresh process: `load` does not restore rng of rank0.torch"
    loaded = Loaded(saved, fresh, fresh, begun=1)
    text = of_resumed(found, loaded, after_load=False, data=data, step=2, random=random)
    assert text.startswith(lost if first else "After step 2 of the resumed run param of w differs")
    assert lost in text
    assert "from the seed 1 that this run was begun with" in text
    assert UNKNOWN not in text
    assert "After the load all that is compared is equal" not in text
    used = of_used(found, fresh, saved, fresh, data, random)
    assert "left with something of its own: rng of rank0.torch differs after the load" in used
