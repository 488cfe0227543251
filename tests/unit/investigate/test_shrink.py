"""Shrinking, with failures that are rules on scenarios: what is taken away, what stays, and when it ends.

*Verifies*: that what is found fails, is simpler, and is the least where one thing at a time leads there; that nothing
is asked twice. *Does not verify*: real failures; tests/conformance/test_shrunk.py shrinks faults and known defects.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.errors import UsageError
from shardproof.investigate.shrink import Shrunk, needed, shrink, weight
from shardproof.program import operations
from shardproof.result import Failure, Result
from shardproof.scenario import Scenario
from shardproof.space.constraints import impossible
from shardproof.verdict import Verdict

BIG = Scenario().with_axes(
    {
        "sharding": "zero1",
        "model": "groups",
        "dtype": "bf16/reduce=fp32/master=fp32",
        "mesh": "2x2x2",
        "load": "shrink",
        "offload": "cpu=0.5",
        "optimizer": "adamw/clip=1.0/schedule=halve/loss_scale=1024.0",
        "microbatches": "2",
        "checkpoint": "gathered",
        "program": "twice",
    }
)
Fails = Callable[[Scenario], bool]


def shrunk(fails: Fails, start: Scenario = BIG, limit_s: float = 60.0) -> tuple[Shrunk, list[Scenario]]:
    """What shrinking comes to where scenarios fail by a rule, and every scenario that it ran."""
    ran: list[Scenario] = []

    def attempt(scenario: Scenario) -> Result:
        ran.append(scenario)
        return result_of(scenario, fails(scenario))

    found = shrink(result_of(start, True), attempt, lambda s: result_of(s, fails(s)), limit_s)
    return found, ran


def result_of(scenario: Scenario, fails: bool) -> Result:
    if not fails:
        return Result(scenario, scenario.system, "", Verdict.PASS)
    return Result(scenario, scenario.system, "", Verdict.CRASH, error=Failure("E", "as it fails"))


def settings(scenario: Scenario) -> dict[str, str]:
    return scenario.axis_values(only_changed=True)


RULES: dict[str, tuple[Fails, dict[str, str]]] = {
    "always": (lambda s: True, {"program": "build"}),
    "two ranks": (lambda s: s.mesh.dp_shard > 1, {"program": "build", "mesh": "1x2x1"}),
    "a load": (lambda s: "load" in operations(s.program), {"program": "build save load"}),
    "a clip in bf16": (
        lambda s: s.optimizer.clip > 0 and s.dtype.storage == "bf16",
        {"program": "build", "dtype": "bf16", "optimizer": "adamw/clip=1.0"},
    ),
    "offload of a part": (
        lambda s: 0 < s.offload.fraction < 1 and s.sharding == "zero1",
        {"program": "build", "offload": "cpu=0.5", "sharding": "zero1"},
    ),
    "masters of bf16, which zero1 alone has": (
        lambda s: s.dtype.storage == "bf16" and s.sharding == "zero1",
        {"program": "build", "dtype": "bf16", "sharding": "zero1"},
    ),
    "fp32 under either sharding, or masters": (
        lambda s: (s.dtype.master is None) == (s.sharding == "fully_shard"),
        {"program": "build"},
    ),
    "two microbatches, then a save": (
        lambda s: s.microbatches == 2 and operations(s.program)[-1] == "save",
        {"program": "build save", "microbatches": "2"},
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_the_failure_needs_stays_and_nothing_else(rule: str) -> None:
    fails, expected = RULES[rule]
    start = BIG if fails(BIG) else BIG.with_axes({"program": "build step save step save"})
    found, _ = shrunk(fails, start)
    left = {"checkpoint": "gathered", **settings(found.result.scenario)}
    assert left == {"checkpoint": "gathered", **expected}
    assert found.complete


@given(st.sets(st.sampled_from(["mesh", "dtype", "offload", "optimizer", "microbatches", "load"]), max_size=3))
def test_it_ends_at_a_failure_that_is_simpler(needed: set[str]) -> None:
    def fails(scenario: Scenario) -> bool:
        return all(getattr(scenario, axis) == getattr(BIG, axis) for axis in needed)

    found, ran = shrunk(fails)
    assert fails(found.result.scenario)
    assert weight(found.result.scenario) <= weight(BIG)
    assert len(ran) == len(set(ran)) == found.tried
    assert all(impossible(scenario) is None for scenario in ran)


def test_another_failure_is_not_the_same() -> None:
    def attempt(scenario: Scenario) -> Result:
        return Result(scenario, scenario.system, "", Verdict.CRASH, error=Failure("E", "another"))

    found = shrink(result_of(BIG, True), attempt, attempt, 60.0)
    assert found.result.scenario == BIG


def test_when_the_time_is_up_what_is_in_hand_counts() -> None:
    found, ran = shrunk(lambda s: True, limit_s=0.0)
    assert (found.result.scenario, found.complete, ran) == (BIG, False, [])


def test_the_time_for_a_confirmation_is_kept_back() -> None:
    clock = [0.0]

    def attempt(scenario: Scenario) -> Result:
        clock[0] += 10.0
        return result_of(scenario, True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardproof.investigate.shrink.time.monotonic", lambda: clock[0])
        found = shrink(result_of(BIG, True), attempt, lambda s: attempt(attempt(s).scenario), 60.0)
    assert (found.complete, found.tried, clock[0]) == (False, 3, 50.0)


def test_an_axis_at_its_default_comes_before_fewer_ranks_and_a_smaller_model() -> None:
    few, small = (Scenario().with_axes(axes) for axes in ({"mesh": "1x3x1"}, {"mesh": "1x2x1", "model": "short"}))
    assert weight(few) < weight(small)


def test_what_a_system_has_in_its_plain_scenario_is_not_needed() -> None:
    plain = Scenario().with_axes({"checkpoint": "gathered", "mesh": "1x2x1", "program": "build step"})
    assert needed(plain) == {"mesh": "1x2x1"}
    assert needed(plain.with_axes({"checkpoint": "model_space"})) == {"mesh": "1x2x1", "checkpoint": "model_space"}


def test_what_came_once_and_not_again_is_not_the_result() -> None:
    found = shrink(result_of(BIG, True), lambda s: result_of(s, True), lambda s: result_of(s, False), 60.0)
    assert found.result.scenario == BIG


def test_what_passes_cannot_be_shrunk() -> None:
    with pytest.raises(UsageError, match="a failure that was reproduced"):
        shrink(result_of(BIG, False), lambda s: result_of(s, False), lambda s: result_of(s, False), 60.0)


def test_faults_and_the_release_stay() -> None:
    start = BIG.with_axes({"faults": "stale-masters", "version": "1.0+cured:7"})
    found, _ = shrunk(lambda s: True, start)
    assert (found.result.scenario.faults, found.result.scenario.version) == (start.faults, start.version)


def test_what_fails_behind_a_move_is_tried_on_that_mesh_alone() -> None:
    start = Scenario().with_axes({"mesh": "1x2x1", "load": "1x1x2", "program": "reshard build"})
    on_the_last = "1x1x2"

    def fails(scenario: Scenario) -> bool:
        words = operations(scenario.program)
        return (scenario.load if "reshard" in words else str(scenario.mesh)) == on_the_last

    found, _ = shrunk(fails, start)
    assert settings(found.result.scenario) == {"mesh": on_the_last, "program": "build"}
