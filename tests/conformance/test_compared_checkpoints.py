"""`shardproof diff` on checkpoints that real libraries write: one training state on two meshes is one state.

The gradients of a scenario do not depend on its mesh, so that two meshes save the same state, differently cut.

*Verifies*: torch's distributed checkpoint, Megatron-Core's, and DeepSpeed's of stages 1 and 3 compare equal over
meshes, but for what says how many ranks there were; at night those of Megatron-FSDP, by itself and in Megatron-Core,
and of Megatron-Core before 0.16, also against 0.16.1. Under Megatron-FSDP 0.15.3 sums here what 0.16.1 averages, and
the comparison says so. *Does not verify*: that libraries are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.compare.differences import Comparison
from shardproof.compare.progress import SilentProgress
from shardproof.compare.run import CompareRequest, compare
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.registry import all_systems
from shardproof.scenario import Scenario

from tests.conformance.sessions import run

pytestmark = pytest.mark.real

COUNTS_RANKS = {"dp_world_size", "global_samples"}

PAIRS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "dcp": ("torch-fsdp2", {"mesh": "1x2x1"}, {"mesh": "1x2x2"}),
    "dcp-full": ("torch-fsdp2", {"mesh": "1x4x1"}, {"mesh": "1x2x1", "checkpoint": "full"}),
    "torch_dist": (
        "megatron-core",
        {"mesh": "1x2x1", "checkpoint": "fully_reshardable", "sharding": "zero1"},
        {"mesh": "1x2x2", "checkpoint": "fully_reshardable", "sharding": "zero1"},
    ),
    "mp_rank": (
        "megatron-core",
        {"mesh": "1x2x1", "checkpoint": "dp_zero", "sharding": "zero1"},
        {"mesh": "1x4x1", "checkpoint": "dp_zero", "sharding": "zero1"},
    ),
    "zero1": ("deepspeed", {"mesh": "1x2x1", "sharding": "zero1"}, {"mesh": "1x4x1", "sharding": "zero1"}),
    "zero3": (
        "deepspeed",
        {"mesh": "1x2x1", "sharding": "fully_shard"},
        {"mesh": "1x4x1", "sharding": "fully_shard"},
    ),
}

FUSED = {"optimizer": "adamw/impl=multi_tensor", "sharding": "zero1"}
UNDER_FSDP = {**FUSED, "options": "fsdp_optim_grads_params", "checkpoint": "fsdp_dtensor"}
IN_RANGES = {**FUSED, "checkpoint": "fully_sharded_model_space", "version": "0.13.0"}
RESHARDABLE = {**FUSED, "checkpoint": "fully_reshardable"}
NEW_IN_016 = ".default_config"
"""A key that param groups have since 0.16."""
AT_NIGHT: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "fsdp_dtensor": ("megatron-core", {**UNDER_FSDP, "mesh": "1x2x1"}, {**UNDER_FSDP, "mesh": "1x4x1"}),
    "megatron-fsdp": ("megatron-fsdp", {"mesh": "1x2x1"}, {"mesh": "1x4x1"}),
    "0.13.0": ("megatron-core", {**IN_RANGES, "mesh": "1x2x1"}, {**IN_RANGES, "mesh": "1x4x1"}),
    "0.15.3-0.16.1": (
        "megatron-core",
        {**RESHARDABLE, "mesh": "1x2x1", "version": "0.15.3"},
        {**RESHARDABLE, "mesh": "1x2x2", "version": "0.16.1"},
    ),
}
PAIRS |= AT_NIGHT


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=[pytest.mark.nightly] if pair in AT_NIGHT else []) for pair in PAIRS]
)
def test_one_state_of_two_meshes_is_equal(laboratory: Laboratory, tmp_path: Path, pair: str) -> None:
    found = compared(laboratory, tmp_path, *PAIRS[pair])
    names = {one.name for one in found.found if not one.name.endswith(NEW_IN_016)}
    assert names - COUNTS_RANKS == set()
    assert found.compared["exp_avg"] >= 7 or pair == "mp_rank"
    assert found.elements > 500


@pytest.mark.nightly
def test_what_another_release_did_is_explained(laboratory: Laboratory, tmp_path: Path) -> None:
    sides = {**UNDER_FSDP, "mesh": "1x2x1", "version": "0.15.3"}, {**UNDER_FSDP, "mesh": "1x4x1", "version": "0.16.1"}
    found = compared(laboratory, tmp_path, "megatron-core", *sides)
    assert {one.name.rpartition(".")[2] for one in found.found if one.kind == "extra"} == {"default_config"}
    explained = {(one.role, one.explanation) for one in found.found if one.role.startswith("exp_avg")}
    assert explained == {("exp_avg", "B is A times 1/2 (0.5)."), ("exp_avg_sq", "B is A times 1/4 (0.25).")}


def compared(laboratory: Laboratory, folder: Path, system: str, *sides: dict[str, str]) -> Comparison:
    """Two checkpoints of two steps of the same training, as `shardproof diff` compares them."""
    for name, axes in zip("ab", sides, strict=True):
        (folder / name).mkdir()
        scenario = Scenario(system=system, program="build step step save").with_axes(axes)
        run(laboratory, scenario, folder / name, quiet=True)
    layouts = [layout for known in all_systems() for layout in known.layouts]
    return compare(CompareRequest(folder / "a/checkpoint0", folder / "b/checkpoint0", layouts), SilentProgress())
