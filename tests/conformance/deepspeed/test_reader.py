"""The reader of DeepSpeed's checkpoints on files made here: what it reads, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from shardproof.program import Op, expand
from shardproof.readers.errors import CheckpointError
from shardproof.scenario import Scenario
from shardproof.systems.deepspeed.stored import STORED

SCENARIO = Scenario(system="deepspeed", sharding="zero1", checkpoint="zero", model="short").with_axes(
    {"mesh": "1x2x1", "dtype": "bf16", "program": "build save"}
)
NUMEL = 16
"""Elements of the model: 6 and 1, 6 and 3; on two ranks they make two parts of 8."""


def save_op(scenario: Scenario) -> Op:
    return next(op for op in expand(scenario) if op.kind == "save")


def part(masters: torch.Tensor) -> dict[str, Any]:
    """A rank's file of optimizer state, before the first step."""
    group = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    state = {"state": {}, "param_groups": [group]}
    return {
        "optimizer_state_dict": {"base_optimizer_state": state, "single_partition_of_fp32_groups": [masters]},
    }


def written(folder: Path, parts: Mapping[int, torch.Tensor]) -> Path:
    """A checkpoint with the masters given by rank."""
    module = {"one.bias": torch.zeros(1, dtype=torch.bfloat16)}
    torch.save({"module": module, "global_steps": 3, "skipped_steps": 1}, folder / "mp_rank_00_model_states.pt")
    for rank, masters in parts.items():
        torch.save(part(masters), folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def test_a_rank_s_part_is_cut_at_its_parameters(tmp_path: Path) -> None:
    whole = torch.arange(NUMEL, dtype=torch.float32)
    found = STORED.read(written(tmp_path, {0: whole[:8], 1: whole[8:]}), save_op(SCENARIO), SCENARIO)
    masters = [(r.fqn, r.rank, r.start[0], r.size[0]) for r in found if r.role == "master"]
    assert masters == [
        ("one.weight", 0, 0, 6), ("one.bias", 0, 0, 1), ("two.weight", 0, 0, 1),
        ("two.weight", 1, 1, 5), ("three.weight", 1, 0, 3),
    ]  # fmt: skip
    (steps,) = (r for r in found if r.role == "iteration")
    assert int.from_bytes(steps.data, "little") == 2
    assert {r.fqn for r in found if r.role == "hyperparameter" and r.rank == 1} >= {"two.weight.lr", "three.weight.eps"}


def test_a_part_that_is_too_short_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, {0: torch.zeros(8), 1: torch.zeros(5)})
    with pytest.raises(CheckpointError, match="elements of"):
        STORED.read(folder, save_op(SCENARIO), SCENARIO)


def test_a_rank_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"given \[0\]; allowed: \[0, 1\]|ranks with a file"):
        STORED.read(written(tmp_path, {0: torch.zeros(8)}), save_op(SCENARIO), SCENARIO)


def test_a_universal_checkpoint_without_a_parameter_is_refused(tmp_path: Path) -> None:
    scenario = SCENARIO.with_axes({"checkpoint": "universal"})
    with pytest.raises(CheckpointError, match=r"folder of one\.weight"):
        STORED.read(written(tmp_path, {}), save_op(scenario), scenario)


def test_a_class_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, {0: torch.zeros(8), 1: torch.zeros(8)})
    torch.save({"module": {}, "hook": print}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"nothing was executed"):
        STORED.read(folder, save_op(SCENARIO), SCENARIO)
