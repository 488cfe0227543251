"""The first file that anyone writes, a system's name and nothing else, and the first line that an error proposes: both
are really run, on every system."""

from __future__ import annotations

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.system import System
from shardproof.space.defaults import completed, nearest
from shardproof.verdict import Verdict

from tests.conformance.built_in import BUILT_IN

CI = ("reference", "torch-fsdp2")
"""Systems that install nothing: theirs run everywhere."""

CASES = [
    pytest.param(system, id=system.name, marks=[] if system.name in CI else [pytest.mark.nightly])
    for system in BUILT_IN
]


@pytest.mark.real
@pytest.mark.parametrize("system", CASES)
def test_a_file_that_names_a_system_alone_is_run_to_a_verdict(system: System, laboratory: Laboratory) -> None:
    result = laboratory.examine_one(completed({"system": system.name, "mesh": "1x2x1"}), confirm=False)
    assert result.verdict is Verdict.PASS or result.verdict.is_failure, result.reason


@pytest.mark.real
@pytest.mark.parametrize("system", CASES)
def test_what_is_proposed_for_a_refused_scenario_is_run_to_a_verdict(system: System, laboratory: Laboratory) -> None:
    refused = {"system": system.name, "mesh": "1x2x1", "options": "no_such_option", "load": "tp_change"}
    result = laboratory.examine_one(nearest(refused), confirm=False)
    assert result.verdict is Verdict.PASS or result.verdict.is_failure, result.reason
