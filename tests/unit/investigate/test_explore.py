"""Exploration of the reference: programs are legal, a planted fault is found and shrunk, clean scenarios pass."""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardproof.errors import UsageError
from shardproof.investigate.explore import (
    JOINS,
    Explored,
    Explorer,
    program_of,
    progress_of,
    report_of,
    status_of,
    to_json,
)
from shardproof.laboratory.judge import ResolvedScenario, run_reference
from shardproof.program import KINDS, operations, require_telling
from shardproof.protocol.registry import system_named
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus, Verdict

from tests.effort import examples


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from(KINDS), max_size=20), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_whatever_is_drawn_is_a_legal_program(
    words: list[str], overflows: bool, unfreezes: bool, moves: bool, accumulates: bool
) -> None:
    program = program_of(words, overflows=overflows, unfreezes=unfreezes, moves=moves, accumulates=accumulates)
    require_telling(program)
    made = operations(program)
    assert overflows or "overflow" not in made
    assert accumulates or "accumulate" not in made
    assert len({"unfreeze", "add_group"} & {*made}) == unfreezes
    assert moves or not {"reshard", "restart"} & {*made}
    if made.count("load"):
        assert {"save", "save_kept", "begin_save"} & {*made}


def test_what_is_legal_is_kept() -> None:
    words = ["build", "step", "save", "step", "save", "load", "step", "restart", "load_model_only"]
    program = program_of(words, overflows=False, unfreezes=False, moves=True)
    assert program == "build step save step save step load step restart build load_model_only reload_params"


@pytest.mark.parametrize("word", KINDS)
def test_every_operation_is_drawn(word: str) -> None:
    words = ["step", "save", "step", "save", "keep", "step", "compute_gradients", word, "step"]
    program = program_of(
        words, overflows=True, unfreezes=word in JOINS, moves=True, accumulates=True, schedules=True, overlaps=True
    )
    assert word in program.split() or word in ("reload_params", "finish_save"), "which go with another operation"


def test_an_optimizer_without_state_is_not_loaded_alone() -> None:
    words = ["step", "save", "step", "load_optimizer_only", "step"]
    assert program_of(words) == "build step save step load_optimizer_only step"
    assert program_of(words, remembers=False) == "build step save step step"


def test_a_load_finds_the_groups_that_were_there_at_its_save() -> None:
    words = ["step", "save", "add_group", "step", "load", "save", "step", "load", "restart", "load"]
    assert program_of(words, unfreezes=True, moves=True) == (
        "build step save add_group step save step load save step load restart build save step load add_group"
    )


def test_a_schedule_is_loaded_alone_and_a_save_goes_on_beside_steps_where_they_can() -> None:
    assert program_of(["load_schedule_only"], schedules=True) == "build save step load_schedule_only"
    assert program_of(["step", "load_schedule_only"]) == "build step"
    assert program_of(["begin_save", "load"], overlaps=True) == "build begin_save step finish_save load"
    assert program_of(["step", "begin_save"]) == "build step"


@pytest.mark.parametrize(
    ("word", "program"),
    [
        ("load", "build save step load"),
        ("load_previous", "build save step save step load_previous"),
        ("load_model_only", "build save step load_model_only reload_params"),
        ("load_optimizer_only", "build save step load_optimizer_only"),
        ("recall", "build keep step recall"),
    ],
)
def test_a_load_has_something_saved_and_something_to_change(word: str, program: str) -> None:
    assert program_of([word]) == program
    assert program_of(["load", "load"]) == "build save step load step load"


@cache
def examine(scenario: Scenario) -> Result:
    """The result of a scenario of the reference, examined in this process."""
    refused = system_named("reference").refusal(scenario)
    if refused:
        return Result(scenario, "reference", "", Verdict.UNSUPPORTED, reason=refused)
    found, _, notes = run_reference(ResolvedScenario.from_scenario(scenario))
    verdict = Verdict.MISMATCH if found.differences else Verdict.CRASH if "crash" in notes else Verdict.PASS
    return Result(
        scenario, "reference", "", Verdict.UNKNOWN if found.distrust else verdict, differences=found.differences,
        explanations=found.explanations, reason=found.distrust,
    )  # fmt: skip


def explored(number: int, *faults: str, seed: int = 0, known: bool = False) -> Explored:
    return Explorer(
        "reference", examine, seed=seed, budget_s=600, examples=number, faults=faults, known=lambda result: known
    ).run()


def test_nothing_fails_on_the_clean_reference() -> None:
    found = explored(examples(25))
    assert found.failures == {}
    assert found.drawn >= examples(25)
    assert len(found.programs) > found.drawn / 3
    assert status_of(found, []) is ExitStatus.OK
    assert report_of("reference", found, 0).endswith("none fails")


def test_what_the_walk_leaves_out_is_not_drawn() -> None:
    drawn: list[Scenario] = []

    def passes(scenario: Scenario) -> Result:
        drawn.append(scenario)
        return Result(scenario, "deepspeed", "", Verdict.PASS)

    Explorer("deepspeed", passes, budget_s=600, examples=300).run()
    universal = [scenario for scenario in drawn if scenario.checkpoint == "universal"]
    assert universal, "which the walk has"
    assert all(scenario.optimizer.kind != "sgd" for scenario in universal), "whose converter knows Adam only"


def test_a_new_parameter_keeps_its_moments_when_a_checkpoint_from_before_the_first_step_is_loaded() -> None:
    scenario = Scenario(
        system="reference", checkpoint="gathered", load="grow",
        program="build save step load build reshard build step step load",
    ).with_axes({"model": "groups", "load_model": "groups+one"})  # fmt: skip
    result = examine(scenario)
    assert result.verdict is Verdict.PASS, result.reason


@pytest.mark.parametrize("number", [25, pytest.param(60, marks=pytest.mark.nightly)])
def test_a_planted_fault_is_found_and_shrunk(number: int) -> None:
    found = explored(number, "no-op-load")
    shortest = min(len(operations(result.scenario.program)) for result in found.failures.values())
    assert shortest <= 6, "a build, a save, another build and a load are enough"
    (first, *_) = found.failures.values()
    assert first.explanations[0].mechanism == "load_did_nothing"
    assert status_of(found, list(found.failures.values())) is ExitStatus.FAILURE
    assert to_json(found, [])["drawn"] == found.drawn


def test_what_is_known_is_no_failure() -> None:
    assert explored(8, "no-op-load", known=True).failures == {}


@pytest.mark.nightly
def test_a_seed_draws_the_same_again() -> None:
    assert explored(30, seed=5).programs == explored(30, seed=5).programs != explored(30, seed=6).programs


def test_without_time_nothing_is_run() -> None:
    found = Explorer("reference", examine, budget_s=0, examples=10).run()
    assert (found.drawn, found.ended) == (0, True)
    assert status_of(found, []) is ExitStatus.NOTHING_RUN
    assert "the time was up" in report_of("reference", found, 0)


def test_what_was_found_is_kept_when_the_user_interrupts() -> None:
    told: list[str] = []

    def third(scenario: Scenario) -> Result:
        if len(told) == 2:
            raise KeyboardInterrupt
        return examine(scenario)

    found = Explorer(
        "reference", third, budget_s=600, on_scenario=lambda found, left_s: told.append(progress_of(found, left_s))
    ).run()
    assert found.interrupted
    assert found.drawn == 2
    assert told[-1].startswith("2 scenarios, 0 failures, ")
    assert ", interrupted: none fails" in report_of("reference", found, 0)


def test_a_system_without_a_walk() -> None:
    with pytest.raises(UsageError):
        Explorer("nobody", examine)
