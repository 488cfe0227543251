"""Every fault of the catalogue shows in the scenario that it names, and its scenario is clean without it."""

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

import subprocess
import sys
from dataclasses import replace

import pytest
from shardproof.faults.catalogue import CATALOGUE, Fault, scenarios_of
from shardproof.faults.logical import override
from shardproof.observe.assemble import assemble
from shardproof.observe.record import WRITTEN
from shardproof.protocol.registry import system_named
from shardproof.reference.system import CrashError
from shardproof.reference.trainer import STAGES as TRAINER_STAGES
from shardproof.scenario import Scenario
from shardproof.space.constraints import CONSTRAINTS

from tests.oracles import records_of

CHOSEN = [fault for fault in CATALOGUE.values() if fault.shows is None and fault.id != "step-in-bf16"]
"""Those whose scenarios were chosen by hand. The canaries plant all of them; a test of this file is nearer to a mistake
in the catalogue."""

PLANTED = [(scenario, fault) for fault in CHOSEN for scenario in scenarios_of(fault)]


@pytest.mark.parametrize(("scenario", "fault"), PLANTED, ids=lambda value: getattr(value, "id", ""))
def test_fault_changes_what_is_observed(scenario: Scenario, fault: Fault) -> None:
    clean, problems = assemble(records_of(replace(scenario, faults=())))
    assert problems == []
    faulty, problems = assemble(records_of(scenario))
    assert problems or faulty != clean


@pytest.mark.parametrize("fault", CATALOGUE.values(), ids=lambda fault: fault.id)
def test_fault_is_documented_and_its_scenarios_are_in_the_space(fault: Fault) -> None:
    assert fault.doc
    assert fault.scenario_axes
    for scenario in scenarios_of(fault):
        assert scenario.faults == (fault.id,)
        assert system_named("reference").refusal(scenario) is None
        assert not [c.id for c in CONSTRAINTS if c.excludes(scenario)]


def test_one_demotion_canary_for_each_stage() -> None:
    assert {f"demote-{stage}" for stage in TRAINER_STAGES} <= set(CATALOGUE)


def test_enough_faults_come_from_real_bugs() -> None:
    assert sum(bool(fault.bug_ids) for fault in CATALOGUE.values()) >= 14


def test_a_stale_index_map_hides_in_a_self_round_trip() -> None:
    (scenario, *_) = scenarios_of(CATALOGUE["stale-index-map"])
    clean, _ = assemble(records_of(replace(scenario, faults=())))
    faulty, _ = assemble(records_of(scenario))
    differing = {key.where for key in clean if clean[key] != faulty.get(key)}
    assert differing == {WRITTEN}


@pytest.mark.parametrize("form", ["gathered", "model_space"])
def test_a_stale_index_map_is_loud_where_shapes_differ(form: str) -> None:
    axes = {**CATALOGUE["stale-index-map"].scenario_axes[0], "model": "mixed_unit", "checkpoint": form}
    with pytest.raises(CrashError, match=r"ValueError: .* elements where its parameter"):
        records_of(Scenario().with_axes({**axes, "faults": "stale-index-map"}))


def test_a_seam_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError):
        override(object(), "no_such_seam", lambda: None)


def test_the_catalogue_imports_no_torch() -> None:
    code = "import sys, shardproof.faults.catalogue; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
