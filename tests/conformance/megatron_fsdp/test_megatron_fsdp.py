"""Real Megatron-FSDP on real gloo ranks against the twin, bit for bit; and that observing changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.models import zoo
from shardproof.scenario import Scenario
from shardproof.systems.megatron_fsdp import SYSTEM

from tests.conformance.megatron_fsdp import RELEASE
from tests.conformance.sessions import assert_equals_the_twin, assert_observing_changes_nothing

pytestmark = pytest.mark.real

BASE = Scenario(system=SYSTEM.name, version=RELEASE, options=("neutral_start",)).with_axes({"mesh": "1x2x1"})


FUSED = {"optimizer": "adamw/impl=multi_tensor", "options": "decoupled_grad+neutral_start"}
CURED = f"{RELEASE}+cured:fused-adam-save"
"""Without it, what FusedAdam has to save under tensor parallelism is written in the wrong order."""
STEPS_EMPTY = f"{RELEASE}+cured:clip-empty-rank"
"""With it torch's optimizers step empty shards; their state must then be there before a load, like everybody's."""
AWARE = {**FUSED, "options": "neutral_start+precision_aware"}

SOUND: tuple[dict[str, str], ...] = (
    {"model": "short", "dtype": "bf16/reduce=fp32/master=fp32", "load": "grow"},
    {"mesh": "1x4x1", "model": "tied", "load": "indivisible"},
    {"mesh": "1x3x1", "model": "groups", "sharding": "zero1", "microbatches": "3", "optimizer": "sgd/momentum=0.9"},
    {"mesh": "2x2x1", "model": "many", "sharding": "zero2", "dtype": "bf16/master=fp32", "load": "shrink"},
    {"mesh": "1x2x2", "model": "twins", "load": "tp_change"},
    {"mesh": "1x4x1", "model": "frozen_tower", "load": "indivisible", "optimizer": "adam/impl=fused"},
    {"model": "mixed_unit", "dtype": "mixed/reduce=fp32/master=fp32", "program": "model_only"},
    {"sharding": "replicate", "model": "unused", "microbatches": "2", "program": "twice"},
    {"model": "experts", "microbatches": "2", "grad_sync": "every", "optimizer": "adamw/schedule=halve"},
    {"model": "swiglu", "optimizer": "adamw/loss_scale=1024.0", "options": "fine_grained_gather+neutral_start"},
    {"model": "frozen_tower", "mesh": "1x3x1", "optimizer": "adamw/clip=1.0", "load": "same"},
    {"model": "many", "mesh": "1x2x2", "load": "tp_change", "dtype": "bf16/master=fp32", "version": CURED, **FUSED},
    {"model": "twins", "program": "model_only", "dtype": "bf16/master=fp32/exp_avg=bf16/exp_avg_sq=bf16", **AWARE},
    {"model": "mixed_unit", "dtype": "mixed/reduce=fp32/master=fp32", "options": "meta+neutral_start"},
    {"model": "twins", "mesh": "1x3x1", "program": "twice", "load": "same", "version": STEPS_EMPTY},
    {"model": "sandwich", "mesh": "1x1x3", "dtype": "bf16", "optimizer": "sgd", "version": STEPS_EMPTY},
)


@pytest.mark.parametrize(
    "axes", [SOUND[0], *(pytest.param(axes, marks=pytest.mark.nightly) for axes in SOUND[1:])], ids=str
)
def test_state_equals_the_twin_bit_for_bit(laboratory: Laboratory, tmp_path: Path, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert SYSTEM.refusal(scenario) is None
    assert_equals_the_twin(laboratory, scenario, tmp_path)


def test_observing_changes_nothing(laboratory: Laboratory, tmp_path: Path) -> None:
    axes = {"model": "short", "dtype": "bf16/master=fp32", "sharding": "zero2"}
    scenario = BASE.with_axes({**axes, "program": "build step save step load step"})
    assert_observing_changes_nothing(laboratory, scenario, tmp_path)


def test_every_limit_has_a_reason_and_every_model_a_verdict() -> None:
    limits = SYSTEM.accepts.limits
    assert len({limit.id for limit in limits}) == len(limits)
    assert all(limit.reason for limit in limits)
    refused = {model for model in zoo() if SYSTEM.refusal(BASE.with_axes({"model": model}))}
    assert refused == {"dropout", "gpt", "hf_dropout", "hollow", "moe", "opaque", "quantised", "scalars"}
    for option in SYSTEM.accepts.options:
        assert SYSTEM.refusal(BASE.with_axes({"options": option, "optimizer": "adamw/impl=multi_tensor"})) is None
