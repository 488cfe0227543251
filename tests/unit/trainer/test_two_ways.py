"""The arm `alike`: another value of an axis is another way to compute the same."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.program import Op
from shardproof.trainer.arms import Session
from shardproof.trainer.cells import scenario_of
from shardproof.trainer.values import wording
from shardproof.trainer.values.notes import of_one_way, rounding
from shardproof.trainer.values.rounding import apart
from simulated import COUNT, LR, MOMENT, PARAM, RNG, Fault, Simulation, State, gone, nothing, only, plus
from trainer_texts import registered

BASE = np.linspace(1, 2, 8, dtype=np.float32)
KEY = Key(0, "live", "param", "w")
ALIKE = "axes = {'mesh': ['2'], 'way': ['a', 'b']}\nalike = {'way': '%s'}"


def alike(folder: Path, promise: str, fault: Fault = nothing) -> tuple[str, str, list[str]]:
    """Verdict, sentence and notes of the arm, of a cell that is not at the first value."""
    trainer = registered(folder, ALIKE % promise)
    scenario = scenario_of(trainer, {"way": "b"}, program="arms 3 0 alike")
    arms = {arm["name"]: arm for arm in Simulation(scenario, fault).judged(folder)["arms"]}
    assert list(arms) == ["uninterrupted", "twin", "alike way"]
    return arms["alike way"]["verdict"], arms["alike way"]["sentence"], arms["alike way"]["notes"]


def an_ulp(value: Any) -> Any:
    return np.nextafter(value, np.float32(np.inf))


@pytest.mark.parametrize("promise", ["bits", "rounding"])
def test_two_ways_that_come_to_the_same_pass_whatever_their_settings_say(folder: Path, promise: str) -> None:
    settings = f"not alike, and taken for settings that say which way it is: {LR[0]} {LR[1]}"
    assert alike(folder, promise, only("alike way", "build", LR, lambda _: "7")) == ("pass", "", [settings])


def test_random_states_that_two_ways_have_differently_are_named(folder: Path) -> None:
    verdict, _, notes = alike(folder, "bits", only("alike way", "step", RNG, plus, 1))
    assert verdict == "pass"
    assert notes == ["not alike, and not compared, since one way may draw more numbers than the other: "
                     "rng of rank0.cpu, rng of rank1.cpu"]  # fmt: skip


@pytest.mark.parametrize("key", [PARAM, MOMENT])
def test_another_value_is_seen_at_the_first_step_that_has_it(folder: Path, key: tuple[str, str]) -> None:
    verdict, sentence, notes = alike(folder, "rounding", only("alike way", "step", key, plus, 1))
    assert (verdict, notes) == ("mismatch", [])
    begins = "way must not matter, but way=a and way=b come to different values after step 1, and not before"
    assert sentence.startswith(f"{begins}: {key[0]}")
    assert "should be" not in sentence
    assert re.search(r"of w is \S+ with way=a and \S+ with way=b in its first element that differs\.", sentence)


@pytest.mark.parametrize("promise", ["bits", "rounding"])
def test_ways_that_begin_with_other_weights_are_told_first_and_no_step_is_blamed(folder: Path, promise: str) -> None:
    verdict, sentence, _ = alike(folder, promise, only("alike way", "build", PARAM, lambda value: value * 1.5))
    assert verdict == "mismatch"
    told, rest = sentence.split(
        ", so that this arm says nothing of their steps. Look at what draws random numbers before "
    )
    assert told == "way=a and way=b are apart right after `build`: they begin with other weights"
    begins = "the weights are made, and at what changes them then. way must not matter, but way=a and way=b come to "
    assert rest.startswith(f"{begins}different values: param of w ")
    assert rest.endswith("Which of the two is right, this arm cannot tell.")


def test_ways_of_which_one_has_a_parameter_more_may_begin_apart_too(folder: Path) -> None:
    def fault(session: Session, op: Op, state: State) -> None:
        if session.name == "alike way":
            state["param", "more"] = np.ones(2, np.float32)
            state[PARAM] = state[PARAM] + (op.kind == "build")

    verdict, sentence, _ = alike(folder, "bits", fault)
    assert verdict == "mismatch"
    assert sentence.startswith("way=a and way=b are apart right after `build`: they begin with other weights, so that ")


def test_ways_that_part_in_a_step_are_not_told_to_begin_apart(folder: Path) -> None:
    assert "right after `build`" not in alike(folder, "bits", only("alike way", "step", PARAM, plus, 0))[1]


def test_a_way_that_updates_more_often_is_told_first(folder: Path) -> None:
    _, sentence, _ = alike(folder, "rounding", only("alike way", "step", COUNT, plus, 1))
    assert sentence.startswith("At step 1, way=a updated parameters twice and way=b once.\nway must not matter, but")


@pytest.mark.parametrize(("back", "told"), [(1, False), (2, True), (3, True)])
def test_a_way_that_puts_back_an_older_state_is_told(folder: Path, back: int, *, told: bool) -> None:
    """The state right before the step may be that of a step that was skipped."""
    seen: list[State] = []

    def fault(session: Session, op: Op, state: State) -> None:
        if session.name == "alike way":
            if op.iteration == 2:
                state |= seen[-back]
            seen.append(copy.deepcopy(state))

    _, sentence, _ = alike(folder, "rounding", fault)
    moment = {2: "step 0", 3: "`build`"}.get(back)
    assert (f"These are the values after {moment} with way=a: an older state was put back." in sentence) is told


def test_what_only_one_of_two_ways_has_is_no_fault_of_either(folder: Path) -> None:
    _, sentence, _ = alike(folder, "rounding", only("alike way", "step", PARAM, gone, 2))
    assert (
        "param of w is there with way=b, and not with way=a. If it has another name there, as in a wrapper of your "
        "own, give what both have in common under common names in `state()`. Which of the two is right, this arm cannot"
    ) in sentence


def test_what_only_one_way_has_hides_no_value_that_differs_later(folder: Path) -> None:
    def fault(session: Session, op: Op, state: State) -> None:
        if session.name == "alike way":
            state["param", "x"] = np.ones(3, np.float32)
            if op.kind == "step" and op.iteration == 2:
                state[PARAM] = plus(state[PARAM])

    _, sentence, _ = alike(folder, "rounding", fault)
    assert "come to different values after step 2, and not before: 2 parameters differ. param of w is" in sentence


def test_rounding_passes_with_a_note_where_it_is_allowed(folder: Path) -> None:
    verdict, sentence, notes = alike(folder, "rounding", only("alike way", "step", PARAM, an_ulp, 2))
    assert (verdict, sentence, len(notes)) == ("pass", "", 1)
    assert notes[0].startswith(wording.ROUNDED)
    assert alike(folder, "bits", only("alike way", "step", PARAM, an_ulp, 2))[0] == "mismatch"


@pytest.mark.parametrize(("share", "passes"), [(0.02, True), (0.1, False)])
def test_rounding_of_bf16_is_taken_where_the_trainer_says_so(folder: Path, share: float, *, passes: bool) -> None:
    off = only("alike way", "step", MOMENT, lambda value: value * np.float32(1 + share), 2)
    verdict, sentence, notes = alike(folder, "rounding bf16", off)
    assert (verdict == "pass") is passes
    assert "rounding is that of bf16: 0.031 of a tensor in the root mean square" in "".join([sentence, *notes])


def test_rounding_in_fp32_is_no_wider_and_is_told(folder: Path) -> None:
    off = only("alike way", "step", MOMENT, lambda value: value * np.float32(1.02), 2)
    verdict, sentence, _ = alike(folder, "rounding", off)
    assert verdict == "mismatch"
    assert "0.02 of the largest change so far; what counts as rounding is 0.001 of it, or 4 units in the" in sentence


def test_no_rounding_is_up_to_infinity() -> None:
    assert "up to 4 units in the last place where nothing had changed before" in rounding(np.inf)
    assert "up to 0.01 of the largest change so far" in rounding(0.01)


def test_state_that_only_one_way_has_is_left_out_and_named(folder: Path) -> None:
    verdict, _, notes = alike(folder, "bits", only("alike way", "step", MOMENT, gone, 2))
    assert verdict == "pass"
    assert notes == [f"{of_one_way([])}exp_avg of w"]


def test_a_parameter_that_is_missing_is_no_matter_of_taste(folder: Path) -> None:
    assert alike(folder, "rounding", only("alike way", "step", PARAM, gone, 2))[0] == "mismatch"


@pytest.mark.parametrize(
    ("value", "start", "told"),
    [
        (BASE + 1, BASE - 1, (1.0, False)), (BASE + 1, BASE, (np.inf, False)), (BASE, BASE - 1, (0.0, True)),
        (BASE + np.float32(2.0**-11), BASE - 1, (2.0**-11, True)),
        (BASE + np.float32(2.0**-9), BASE - 1, (2.0**-9, False)),
        (np.nextafter(BASE, np.float32(9)), BASE - np.float32(2.0**-20), (0.25, True)),
        (np.where(np.arange(8) == 2, np.float32(np.nan), BASE), BASE - 1, (np.inf, False)),
    ],
)  # fmt: skip
def test_a_difference_is_measured_by_what_the_steps_changed(value: Any, start: Any, told: tuple[float, bool]) -> None:
    sides = [{PARAM: Value("fp32", (8,), array.astype(np.float32).tobytes())} for array in (start, BASE, value)]
    share, rounding = apart(Difference(KEY, "bits", total=8, mismatched=1), *sides)
    assert rounding is told[1]
    assert share == pytest.approx(told[0], rel=0.1)


def test_ways_that_differ_by_rounding_alone_are_led_to_the_wider_promise(folder: Path) -> None:
    def little(value: Any) -> Any:
        return value * np.float32(1 + 2.0**-22)

    verdict, sentence, _ = alike(folder, "bits", only("alike way", "step", PARAM, little, 1))
    assert verdict == "mismatch"
    assert sentence.endswith(wording.ROUNDS_ALONE)
    assert wording.ROUNDS_ALONE not in alike(folder, "bits", only("alike way", "step", PARAM, plus, 1))[1]
    assert alike(folder, "rounding", only("alike way", "step", PARAM, little, 1))[0] == "pass"
