"""The worked example of docs/adding-a-fault.md: a defect of the reference's save, and that it is noticed.

*Verifies*: what the page says of it: where it shows, that the scenario is clean without it, what explains it, and a
scenario in which it cannot show.
*Does not verify*: the faults of the catalogue, which tests/unit/faults/test_reference_faults.py and the canaries do.
"""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from shardproof.faults.catalogue import Fault, scenarios_of
from shardproof.faults.logical import override, through_bf16
from shardproof.laboratory.judge import Judgement, ResolvedScenario, judge
from shardproof.reference.system import Ranks
from shardproof.scenario import Scenario

from tests.oracles import records_of

if TYPE_CHECKING:
    from shardproof.reference.numerics import Array


def moment_rounded_on_save(ranks: Ranks) -> None:
    """Write second moments as bf16 would hold them."""

    def export(role: str, values: Array) -> Array:
        written = original(role, values)
        return through_bf16(written) if role == "exp_avg_sq" else written

    original = override(ranks.saver, "export", export)


FAULT = Fault(
    "moment-rounded-on-save",
    (),
    "a save writes second moments as bf16 holds them",
    ({"mesh": "1x2x1", "checkpoint": "sharded", "program": "build step save step restart build load step"},),
    moment_rounded_on_save,
    "narrowed",
)


def judged(scenario: Scenario, fault: Fault | None) -> Judgement:
    """What is found in a run of the reference, with a fault planted in it or none."""
    clean = replace(scenario, faults=())
    return judge(ResolvedScenario.from_scenario(clean), records_of(clean, install=fault.install if fault else None))


(SCENARIO,) = scenarios_of(FAULT)


def test_it_shows_first_in_what_the_save_wrote() -> None:
    differing = [found.key for found in judged(SCENARIO, FAULT).differences if found.fails]
    first = min(key.op for key in differing)
    assert first == 2, "operation 2 is the save"
    assert {(key.where, key.role) for key in differing if key.op == first} == {("written", "exp_avg_sq")}


def test_its_control_passes() -> None:
    found = judged(SCENARIO, None)
    assert not found.differences
    assert found.distrust == ""


def test_it_is_explained() -> None:
    best = judged(SCENARIO, FAULT).explanations[0]
    assert (best.mechanism, best.confidence) == ("narrowed", "certain")


def test_a_scenario_that_stores_bf16_cannot_show_it() -> None:
    blind = replace(SCENARIO, dtype=Scenario.from_axes({"dtype": "bf16"}).dtype)
    assert not judged(blind, FAULT).differences


def test_a_seam_that_is_not_there_is_an_error() -> None:
    def renamed(ranks: Ranks) -> None:
        override(ranks.saver, "exprot", lambda *_: None)

    with pytest.raises(AttributeError, match="exprot"):
        judged(SCENARIO, replace(FAULT, install=renamed))
