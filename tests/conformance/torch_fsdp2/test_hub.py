"""Models that are written as the hub has them: torch's HuggingFaceStorageWriter, its joined files and its shards.

*Verifies*: round trips over meshes that change, and that what a joined file holds is compared.
*Does not verify*: writing by rank 0 alone (`save_distributed=False`), and files of quantised weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.program import expand
from shardproof.readers.errors import CheckpointError
from shardproof.scenario import Scenario
from shardproof.systems.torch_fsdp2.stored import STORED
from shardproof.verdict import Verdict

IGNORED = {"model": "scalars", "options": "ignored", "optimizer": "sgd/impl=forloop"}


@pytest.mark.real
@pytest.mark.parametrize(
    "axes",
    [
        {"checkpoint": "dcp-hf+two_files", "mesh": "1x2x2", "load": "tp_change", "model": "twins", "dtype": "mixed"},
        {"checkpoint": "dcp-hf+in_shards", **IGNORED},
        pytest.param({"checkpoint": "dcp-hf", "load": "grow", "dtype": "bf16"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint": "dcp-hf+two_files", "model": "tied"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_model_comes_back(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(Scenario.from_axes({"system": "torch-fsdp2", "mesh": "1x2x1", **axes}))
    assert (result.verdict, result.signature, result.reason) == (Verdict.PASS, "", "")


def test_a_checkpoint_without_its_safetensors_is_no_empty_one(tmp_path: Path) -> None:
    scenario = Scenario.from_axes({"system": "torch-fsdp2", "checkpoint": "dcp-hf"})
    save = next(op for op in expand(scenario) if op.kind == "save")
    with pytest.raises(CheckpointError, match="shards of safetensors"):
        STORED.read(tmp_path, save, scenario)
