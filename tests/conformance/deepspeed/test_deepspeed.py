"""Real DeepSpeed on real gloo ranks against the twin, bit for bit; and that observing changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.models import zoo
from shardproof.scenario import Scenario
from shardproof.systems.deepspeed import SYSTEM

from tests.conformance.deepspeed import RELEASE
from tests.conformance.sessions import assert_equals_the_twin, assert_observing_changes_nothing

pytestmark = pytest.mark.real

BASE = Scenario(system=SYSTEM.name, version=RELEASE, sharding="zero1", checkpoint="zero").with_axes({"mesh": "1x2x1"})
IN_CI = 5
"""How many of the scenarios below run in every CI: one a stage, offload, and a universal checkpoint."""


SOUND: tuple[dict[str, str], ...] = (
    {"dtype": "bf16"},
    {"sharding": "zero2", "dtype": "fp16", "model": "short", "mesh": "1x4x1", "microbatches": "2"},
    {"sharding": "fully_shard", "dtype": "bf16", "model": "tied", "mesh": "1x3x1"},
    {"offload": "cpu", "sharding": "zero2", "dtype": "bf16/reduce=fp32", "optimizer": "adamw/clip=1.0"},
    {"checkpoint": "universal", "dtype": "bf16", "load": "grow"},
    {"dtype": "fp32", "model": "groups", "optimizer": "sgd/nesterov=true", "options": "round_robin"},
    {"dtype": "bf16/reduce=fp32", "mesh": "1x3x1", "optimizer": "adamw/clip=1.0", "program": "twice"},
    {"dtype": "fp16", "optimizer": "adamw/loss_scale=1024.0", "program": "overflow", "options": "no_hysteresis"},
    {"sharding": "zero2", "model": "many", "options": "overlap_comm+small_buckets", "program": "rollback"},
    {"sharding": "zero2", "model": "unused", "mesh": "1x7x1", "options": "parameter_alignment", "microbatches": "3"},
    {"model": "resting", "microbatches": "2", "dtype": "bf16", "program": "train"},
    {"sharding": "fully_shard", "model": "frozen_tower", "dtype": "bf16", "program": "restart"},
    {"sharding": "fully_shard", "model": "groups", "options": "sub_groups", "optimizer": "adamw/clip=1.0"},
    {"sharding": "fully_shard", "offload": "cpu", "dtype": "fp32", "options": "eager_release"},
    {"sharding": "fully_shard", "model": "many", "options": "persistent", "optimizer": "adamw/schedule=halve"},
    {"sharding": "fully_shard", "checkpoint": "universal", "mesh": "1x4x1", "load": "shrink"},
    {"program": "model_only", "dtype": "fp16", "model": "short"},
)


@pytest.mark.parametrize(
    "axes", [*SOUND[:IN_CI], *(pytest.param(axes, marks=pytest.mark.nightly) for axes in SOUND[IN_CI:])], ids=str
)
def test_state_equals_the_twin_bit_for_bit(laboratory: Laboratory, tmp_path: Path, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert SYSTEM.refusal(scenario) is None
    assert_equals_the_twin(laboratory, scenario, tmp_path)


@pytest.mark.parametrize("sharding", ["zero1", "fully_shard"])
def test_observing_changes_nothing(laboratory: Laboratory, tmp_path: Path, sharding: str) -> None:
    axes = {"model": "short", "dtype": "bf16", "sharding": sharding, "program": "build step save step load step"}
    assert_observing_changes_nothing(laboratory, BASE.with_axes(axes), tmp_path)


def test_every_limit_has_a_reason_and_every_model_a_verdict() -> None:
    limits = SYSTEM.accepts.limits
    assert len({limit.id for limit in limits}) == len(limits)
    assert all(limit.reason for limit in limits)
    refused = {model for model in zoo() if SYSTEM.refusal(BASE.with_axes({"model": model}))}
    assert refused == {"dropout", "hf_dropout", "moe", "opaque", "quantised"}
    for option in SYSTEM.accepts.options:
        asked = BASE.with_axes({"options": option, "microbatches": "2", "optimizer": "adamw/schedule=halve"})
        others: list[dict[str, str]] = [{}, {"sharding": "fully_shard"}, {"program": "model_only"}]
        assert None in [SYSTEM.refusal(asked.with_axes(axes)) for axes in others]


@pytest.mark.parametrize(
    ("program", "schedule", "left_out"),
    [
        ("rewind", "warmup", True),
        ("rewind", "linear", True),
        ("rewind", "cosine", False),
        ("rollback", "linear", False),
        ("save_first", "linear", False),
    ],
)
def test_a_load_over_steps_at_a_rate_of_zero_shows_nothing(program: str, schedule: str, left_out: bool) -> None:
    asked = BASE.with_axes({"program": program, "optimizer": f"adamw/schedule={schedule}"})
    assert [c.id for c in SYSTEM.accepts.constraints if c.excludes(asked)] == ["rewind-at-rest"] * left_out
