"""Scripts for DeepSpeed of failures that a model of a few weights shows, from a failure as a run would have met it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardproof.diff import Difference
from shardproof.export.job import written
from shardproof.investigate.cure_table import scenario_of
from shardproof.observe.logical import Key
from shardproof.program import expand
from shardproof.protocol.registry import system_named
from shardproof.result import FailedOp, Failure, Result
from shardproof.verdict import Verdict

LONGEST = 80
"""Lines of a script that somebody upstream reads."""

STATE = {
    "module-only-3": (4, "live", "param", "down.weight"),
    "resting-3": (2, "live", "param", "odd.weight"),
    "resting-offload": (2, "live", "param", "odd.weight"),
    "offload-overflow": (3, "live", "step", "down.bias"),
    "coalesced-dtype": (1, "live", "param", "down.weight"),
    "universal-groups-3": (4, "live", "hyperparameter", "a.bias.weight_decay"),
    "universal-module-only": (4, "live", "step", "down.bias"),
    "universal-round-robin": (2, "written", "exp_avg", "two.weight"),
    "universal-rewound": (4, "live", "step", "down.bias"),
    "universal-frozen": (4, "live", "param", "tower.vision.weight"),
}
"""Regression → number of the operation, where the difference is, role and name."""

ERRORS = {
    "universal-first-3": (1, "KeyError"),
    "writer-rank": (0, "AttributeError"),
    "offload-states-frozen": (1, "RuntimeError"),
    "universal-empty-part": (4, "IndexError"),
}
"""Regression → number of the operation, and what it raises."""


def failure(name: str) -> Result:
    """What a run of a regression gives, of which the first difference or the error alone counts here."""
    scenario = scenario_of(system_named("deepspeed"), name)
    number, *told = STATE.get(name) or ERRORS[name]
    result = Result(
        scenario, "deepspeed", "0.19.8", Verdict.CRASH, failed_op=FailedOp(number, expand(scenario)[number].kind)
    )
    if name in ERRORS:
        return replace(result, error=Failure(told[0], "no such key", 0, "", number))
    where, role, fqn = told
    difference = Difference(Key(number, where, role, fqn), "bits", (0,), 1, 4)
    return replace(result, verdict=Verdict.MISMATCH, differences=(difference,))


@pytest.mark.parametrize("name", [*STATE, *ERRORS])
def test_a_known_failure_has_a_script_that_a_reader_takes_in(name: str) -> None:
    made = written(failure(name), f"deepspeed-{name}")
    compile(made.script, name, "exec")
    assert len(made.script.splitlines()) <= LONGEST
    assert made.draft.template == "deepspeed_own.py.j2"
    assert "SHAPES" not in made.script


@pytest.mark.parametrize("name", ["module-only-3", "universal-first-3", "universal-round-robin"])
def test_a_script_of_the_whole_scenario_is_there_where_that_of_a_few_weights_shows_nothing(name: str) -> None:
    made = written(failure(name), f"deepspeed-{name}", whole=True)
    assert made.draft.template == "deepspeed.py.j2"
    assert "SHAPES" in made.script


def test_one_rank_is_enough_but_for_what_is_dealt_out_to_several() -> None:
    several = {name for name in (*STATE, *ERRORS) if "mp.spawn" in written(failure(name), None).script}
    assert several == {"universal-round-robin", "universal-empty-part"}
