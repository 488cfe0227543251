"""Random generators of Megatron-Core's ranks, with dropout as what draws from them: the library's tracker, seeded and
forked by the library, saved by real ranks as the training script does, and restored in fresh ones; and scripts that do
it wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

from tests.conformance.megatron_core import careless

pytestmark = pytest.mark.real

DROPOUT = {
    "model": "dropout",
    "dtype": "bf16/master=fp32",
    "sharding": "zero1",
    "optimizer": "adamw/impl=multi_tensor",
    "checkpoint": "dp_zero",
    "program": "build step save step restart build step build load step",
    "microbatches": "2",
}
EXPERTS = {"expert_parallel": "2", "mesh": "1x4x1"}
SHARDED = {"sharding": "replicate", "checkpoint": "sharded"}
RESHARDABLE = {"checkpoint": "fully_reshardable"}


@pytest.mark.parametrize(
    "axes",
    [
        {"mesh": "1x1x2", **RESHARDABLE},
        {"mesh": "1x2x1"},
        pytest.param({"mesh": "1x2x1", **RESHARDABLE, "load": "grow"}, marks=pytest.mark.nightly),
        pytest.param({"mesh": "1x2x2", **RESHARDABLE, "load": "tp_change"}, marks=pytest.mark.nightly),
        pytest.param({"mesh": "1x1x2", **SHARDED, "load": "tp_change"}, marks=pytest.mark.nightly),
        pytest.param({"mesh": "1x2x1", **SHARDED, "program": "rollback"}, marks=pytest.mark.nightly),
        pytest.param({"mesh": "1x2x1", "program": "model_only"}, marks=pytest.mark.nightly),
        pytest.param({**EXPERTS, **RESHARDABLE}, marks=pytest.mark.nightly),
        pytest.param({**EXPERTS, "load": "shrink"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_generators_are_saved_and_restored(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(Scenario.from_axes({"system": "megatron-core", **DROPOUT, **axes}))
    assert (result.verdict, result.signature, result.reason) == (Verdict.PASS, "", "")


@pytest.mark.nightly
@pytest.mark.parametrize(("version", "sharding"), [("0.13.0", "zero1"), ("0.15.3", "replicate")])
def test_older_releases_restore_them(laboratory: Laboratory, version: str, sharding: str) -> None:
    own = {"mesh": "1x1x2"} if sharding == "zero1" else {"mesh": "1x1x2", **SHARDED}
    scenario = replace(Scenario.from_axes({"system": "megatron-core", **DROPOUT, **own}), version=version)
    result = laboratory.examine_one(scenario)
    assert (result.verdict, result.signature, result.reason) == (Verdict.PASS, "", "")


@pytest.mark.nightly
def test_016_finds_no_generators_of_experts_on_more_ranks(laboratory: Laboratory) -> None:
    axes = {**DROPOUT, **RESHARDABLE, "expert_parallel": "2", "mesh": "1x2x1", "load": "grow"}
    result = laboratory.examine_one(replace(Scenario.from_axes({"system": "megatron-core", **axes}), version="0.16.1"))
    assert result.verdict is Verdict.CRASH
    assert "Missing key in checkpoint state_dict: rng_state/shard_N.N.N_N.N.N" in result.signature


def examined(laboratory: Laboratory, system: System, **axes: str) -> Result:
    return laboratory.examine_one(Scenario.from_axes({"system": system.name, **DROPOUT, "mesh": "1x1x2", **axes}))


def test_a_script_that_forgets_the_tracker_is_caught(laboratory: Laboratory) -> None:
    result = examined(laboratory, careless.NO_TRACKER)
    assert result.signature == f"{result.system} mismatch: save: written rng missing"
    assert {d.key.fqn for d in result.differences if d.key.where == "written"} == {
        "rank0.data.0", "rank0.tensor.0", "rank0.tensor.1", "rank0.expert.0", "rank0.expert.1",
    }  # fmt: skip
    assert {d.key.fqn for d in result.differences if d.key.where == "live"} >= {"rank0.tensor", "rank1.tensor"}


def test_a_script_that_saves_rank_0s_for_all_is_caught_and_explained(laboratory: Laboratory) -> None:
    result = examined(laboratory, careless.RANK_0S)
    assert result.verdict is Verdict.MISMATCH
    wrong = {d.key.fqn for d in result.differences}
    assert wrong == {"rank1.tensor", "rank1.expert", "rank0.tensor.1", "rank0.expert.1"}
    assert "stream_of_another_rank" in {each.mechanism for each in result.explanations}
