"""Random generators of a training script over TransformerEngine, with dropout as what draws from them: the library's
tracker, whose states the script saves and restores in fresh ranks; and scripts that do it wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

from tests.conformance.transformer_engine import careless

pytestmark = pytest.mark.real

DROPOUT = {
    "model": "dropout",
    "mesh": "1x2x1",
    "optimizer": "adamw/impl=multi_tensor",
    "program": "build step save step restart build step build load step",
    "microbatches": "2",
}


@pytest.mark.parametrize(
    "axes",
    [
        {"mesh": "1x1x2"},
        pytest.param({"mesh": "1x2x2", "load": "tp_change"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint": "full", "load": "grow"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint": "dcp-stateful", "load": "shrink"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint": "dcp-async", "program": "rollback"}, marks=pytest.mark.nightly),
        pytest.param({"program": "model_only"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_generators_are_saved_and_restored(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(Scenario.from_axes({"system": "transformer-engine", **DROPOUT, **axes}))
    assert (result.verdict, result.signature, result.reason) == (Verdict.PASS, "", "")


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["2.10.0", "2.18.0"])
def test_older_releases_restore_them(laboratory: Laboratory, version: str) -> None:
    scenario = replace(
        Scenario.from_axes({"system": "transformer-engine", **DROPOUT, "optimizer": "adamw"}), version=version
    )
    result = laboratory.examine_one(scenario)
    assert (result.verdict, result.signature, result.reason) == (Verdict.PASS, "", "")


def examined(laboratory: Laboratory, system: System) -> Result:
    return laboratory.examine_one(Scenario.from_axes({"system": system.name, **DROPOUT}))


def test_a_script_that_forgets_the_tracker_is_caught(laboratory: Laboratory) -> None:
    result = examined(laboratory, careless.NO_TRACKER)
    assert result.signature == f"{result.system} mismatch: save: written rng missing"
    assert {d.key.fqn for d in result.differences if d.key.where == "live"} == {
        f"rank{rank}.{stream}" for rank in (0, 1) for stream in ("tensor", "expert", "data")
    }


def test_a_script_that_saves_rank_0s_for_all_is_caught_and_explained(laboratory: Laboratory) -> None:
    result = examined(laboratory, careless.RANK_0S)
    assert result.verdict is Verdict.MISMATCH
    assert {d.key.fqn for d in result.differences} == {"rank1.data", "rank0.data.1"}
    assert result.explanations[0].mechanism == "stream_of_another_rank"
