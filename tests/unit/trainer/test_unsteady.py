"""What is said of two runs that differ: the likely reason, and the value of an axis that it comes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Value
from shardproof.result import ArmResult, Result
from shardproof.scenario import Scenario
from shardproof.trainer.described import Described
from shardproof.trainer.judge.unsteady import ORDER, UNWRITTEN, compared, likely
from shardproof.verdict import Verdict

PARAM = ("param", "w")
TRAINER = Described(Path("mine.py"), "Mine", "", {"recompute": ("no", "yes"), "early": ("stop", "run")})


def value(*numbers: float) -> Value:
    return Value("fp32", (len(numbers),), np.array(numbers, np.float32).tobytes())


@pytest.mark.parametrize(
    ("one", "other", "before", "told"),
    [
        ((1.0, 2.0), (1.0, 2.1), (1.0, 1.9), ORDER),
        ((1.0, 2.0), (1.0, -3e22), (1.0, 1.9), UNWRITTEN),
        ((1.0, float("nan")), (1.0, 2.0), (1.0, 1.9), UNWRITTEN),
        ((1.0, float("nan")), (1.0, 2.0), None, UNWRITTEN),
        ((1.0, float("nan")), (1.0, 2.0), (float("nan"), 1.9), ORDER),
        ((0.0, 0.0), (0.0, 2.0), (0.0, 0.0), ORDER),
    ],
)
def test_values_that_no_step_makes_are_memory_that_nobody_wrote(
    one: tuple[float, ...], other: tuple[float, ...], before: tuple[float, ...] | None, told: str
) -> None:
    found = [Difference(Key(1, "live", *PARAM), "bits", total=2, mismatched=1)]
    runs = [{PARAM: value(*one)}, {PARAM: value(*other)}]
    assert likely(found, "step", runs, {PARAM: value(*before)} if before else {}) == told
    assert "a generator" in likely(found, "build", runs, {})


def cell(words: str, verdict: Verdict) -> Result:
    scenario = Scenario.from_axes({"system": "mine:Mine", "program": "arms", "options": words})
    sentence = f"They differ; {ORDER}. No more." if verdict is Verdict.NONDETERMINISTIC else ""
    return Result(scenario, "mine:Mine", "1", verdict, arms=(ArmResult("twice", verdict.value, sentence),))


def told(*results: Result) -> str:
    return compared(TRAINER, results)[0].arms[0].sentence


def test_the_value_of_an_axis_that_it_comes_with_takes_the_place_of_a_guess() -> None:
    bad, both = cell("recompute=yes", Verdict.NONDETERMINISTIC), cell("recompute=yes+early=run", Verdict.PASS)
    plain = cell("", Verdict.PASS)
    assert told(bad) == bad.arms[0].sentence
    assert told(bad, plain) == (
        "They differ. No more. With recompute=no, and all else alike, it is deterministic, so that what differs comes "
        "with recompute=yes."
    )
    assert told(bad, plain, both).endswith("comes with recompute=yes and early=stop together.")
    assert told(bad, cell("early=run", Verdict.PASS)) == bad.arms[0].sentence
    assert compared(TRAINER, [plain, bad])[0] == plain
