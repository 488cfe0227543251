"""Shrinking a trainer's cell, with failures that are rules: axes go to their first values, arms and steps go away."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.diff import Difference
from shardproof.investigate.shrink import face, shrink
from shardproof.observe.logical import Key
from shardproof.program import expand, is_arms
from shardproof.protocol import registry
from shardproof.result import ArmResult, Result
from shardproof.scenario import Scenario
from shardproof.trainer.cells import scenario_of
from shardproof.verdict import Verdict
from trainer_texts import registered

DATA = "axes = {'mesh': ['2', '4'], 'offload': [False, True], 'lr': [0.1, 0.2]}\naltered = {'lr': 'run'}"


@pytest.fixture(autouse=True)
def _systems_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))


def failing(scenario: Scenario, *arms: str) -> Result:
    """A result in which those of the arms fail that the program has, each with a difference of its own."""
    there = {op.arm: op.index for op in expand(scenario)}
    found = [arm for arm in arms if arm in there]
    differences = tuple(Difference(Key(there[arm], "live", "exp_avg", "w"), "bits") for arm in found)
    told = tuple(ArmResult(arm, Verdict.MISMATCH.value, f"{arm} fails.") for arm in found)
    verdict = Verdict.MISMATCH if found else Verdict.PASS
    return Result(scenario, scenario.system, "2.13.0", verdict, differences=differences, arms=told)


@pytest.mark.parametrize(
    ("arms", "program"),
    [
        (["used", "other mesh 1"], "arms 1 1 used"),
        (["resumed", "used", "again"], "arms 1 1 resumed"),
        (["other mesh 1"], "arms 1 1 other-mesh"),
        (["altered lr"], "arms 1 1 altered"),
        (["uninterrupted"], "arms 1 1 uninterrupted"),
    ],
)
def test_the_first_failing_arm_is_left_with_one_step_each(tmp_path: Path, arms: list[str], program: str) -> None:
    start = scenario_of(registered(tmp_path, DATA), {"mesh": "4", "offload": "true", "lr": "0.1"})

    def attempt(scenario: Scenario) -> Result:
        fails = is_arms(scenario.program) and "offload=true" in scenario.options
        return failing(scenario, *arms) if fails else failing(scenario)

    found = shrink(attempt(start), attempt, attempt, 60.0)
    assert (found.result.scenario.options, found.result.scenario.program) == (("offload=true",), program)
    assert found.complete


def test_a_failure_of_another_arm_or_of_another_kind_is_another(tmp_path: Path) -> None:
    scenario = scenario_of(registered(tmp_path, DATA), {})
    assert face(failing(scenario, "resumed", "used")) == face(failing(scenario, "resumed"))
    assert face(failing(scenario, "used")) != face(failing(scenario, "resumed"))
    assert face(failing(scenario)) == ""
