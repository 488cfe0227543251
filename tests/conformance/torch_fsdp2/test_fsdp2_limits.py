"""What FSDP2 refuses, as the parent decides it: no torch is imported here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.scenario import Scenario
from harness.systems.registry import system_info
from harness.systems.torch_fsdp2 import FORMATS, LIMITS, CheckpointPlan, checkpoint_plan, unsupported

BASE = Scenario(system="torch-fsdp2")

REFUSED = [
    ("mixed-storage-group", {"model": "mixed_unit", "dtype": "mixed"}),
    ("reshard-divisor", {"mesh": "1x4x1", "reshard_after_forward": "3"}),
    ("reshard-divisor-tp", {"mesh": "1x4x2", "reshard_after_forward": "2"}),
    ("fused-sgd", {"optimizer": "sgd/impl=fused"}),
    ("scaler-fp16-gradients", {"dtype": "fp16", "optimizer": "adamw/loss_scale=1024.0"}),
    ("sharding", {"sharding": "zero1"}),
    ("master", {"dtype": "bf16/master=fp32"}),
    ("offload-fraction", {"offload": "cpu=0.5"}),
    ("checkpoint", {"checkpoint": "bucket"}),
    ("fp16-range", {"dtype": "fp32/param=fp16", "optimizer": "adamw/loss_scale=65536.0"}),
    ("optimizer-impl", {"optimizer": "adamw/impl=multi_tensor"}),
    ("schedule", {"optimizer": "adamw/schedule=linear"}),
    ("options", {"options": "precision_aware"}),
    ("expert-parallel", {"expert_parallel": "2", "mesh": "1x2x1"}),
    ("logical-faults", {"faults": "swapped-states"}),
]


@pytest.mark.parametrize(("limit", "axes"), REFUSED, ids=[limit for limit, _ in REFUSED])
def test_each_limit_refuses_its_scenario_with_its_reason(limit: str, axes: dict[str, str]) -> None:
    entry = next(entry for entry in LIMITS if entry.id == limit)
    assert entry.refuses(BASE.with_axes(axes))
    assert unsupported(BASE.with_axes(axes)) == entry.reason


def test_every_limit_is_covered_here() -> None:
    assert [limit for limit, _ in REFUSED] == [entry.id for entry in LIMITS]


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"model": "twins", "dtype": "mixed"},
        {"model": "mixed_unit", "dtype": "bf16"},
        {"model": "mixed_unit", "dtype": "mixed", "program": "build save reshard build load"},
        {"mesh": "1x4x1", "reshard_after_forward": "2"},
        {"dtype": "fp32/param=fp16", "optimizer": "adamw/loss_scale=2048.0"},
        {"dtype": "fp32/param=bf16", "optimizer": "adamw/loss_scale=65536.0"},
        {"offload": "cpu", "checkpoint": "full+cpu_offload+broadcast_from_rank0"},
    ],
    ids=str,
)
def test_neighbours_of_the_limits_are_supported(axes: dict[str, str]) -> None:
    assert unsupported(BASE.with_axes(axes)) is None


def test_the_mesh_after_a_reshard_counts_for_the_divisor() -> None:
    shrinking = {"mesh": "1x4x1", "load": "shrink", "reshard_after_forward": "4"}
    assert unsupported(BASE.with_axes(shrinking)) is not None
    assert unsupported(BASE.with_axes({**shrinking, "program": "train"})) is None


def test_checkpoint_texts() -> None:
    assert checkpoint_plan("full+no_strict+cpu_offload") == CheckpointPlan("full", cpu_offload=True, strict=False)
    for text in ("dcp+broadcast_from_rank0", "full+", "full+flatten+flatten", "Full", ""):
        assert checkpoint_plan(text) is None
    for form, options in FORMATS.items():
        assert checkpoint_plan("+".join([form, *options])) is not None


def test_an_error_of_the_library_has_a_source() -> None:
    for entry in LIMITS:
        assert (entry.error is None) == (entry.source == ""), entry.id


def test_registering_the_system_imports_no_torch() -> None:
    code = "import sys, harness.systems.torch_fsdp2; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert system_info("torch-fsdp2").world == "fork"
