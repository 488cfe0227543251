"""`shardproof diff` on checkpoints that real libraries write: one training state on two meshes is one state.

The gradients of a scenario do not depend on its mesh, so that two meshes save the same state, differently cut.

*Verifies*: torch's distributed checkpoint, Megatron-Core's, and DeepSpeed's of stages 1 and 3 compare equal over
meshes, but for what says how many ranks there were. *Does not verify*: that libraries are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.compare.progress import SilentProgress
from harness.compare.run import Request, compare
from harness.laboratory import Laboratory
from harness.scenario import Scenario
from harness.systems.registry import all_systems
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


@pytest.mark.parametrize("pair", PAIRS)
def test_one_state_of_two_meshes_is_equal(laboratory: Laboratory, tmp_path: Path, pair: str) -> None:
    system, *sides = PAIRS[pair]
    for name, axes in zip("ab", sides, strict=True):
        (tmp_path / name).mkdir()
        scenario = Scenario(system=system, program="build step step save").with_axes(axes)
        run(laboratory, scenario, tmp_path / name, quiet=True)
    layouts = [layout for known in all_systems() for layout in known.layouts]
    found = compare(Request(tmp_path / "a/checkpoint0", tmp_path / "b/checkpoint0", layouts), SilentProgress())
    assert {one.name for one in found.found} - COUNTS_RANKS == set()
    assert found.compared["exp_avg"] >= 7 or pair == "mp_rank"
    assert found.elements > 500
