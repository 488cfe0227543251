"""Real Megatron-Core on real gloo ranks and the emulated device against the twin, bit for bit.

What it refuses for the library's sake, the conformance kit asks the library (`test_kit.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.models import zoo
from shardproof.scenario import Scenario
from shardproof.systems.megatron_core import SYSTEM

from tests.conformance.megatron_core import RELEASE
from tests.conformance.sessions import assert_equals_the_twin, assert_observing_changes_nothing

BASE = Scenario(system=SYSTEM.name, version=RELEASE, sharding="zero1", checkpoint="dp_zero").with_axes(
    {"dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor", "program": "train", "mesh": "1x2x1"}
)


@pytest.mark.real
@pytest.mark.parametrize(
    "axes",
    [
        {"mesh": "1x1x1"},
        {"mesh": "1x3x1", "model": "short", "dtype": "bf16/reduce=fp32/master=fp32", "microbatches": "3"},
        {"dtype": "fp32", "model": "unused", "optimizer": "adam/impl=multi_tensor"},
        {"mesh": "1x2x2", "model": "mixed_unit", "dtype": "mixed/master=fp32",
         "optimizer": "adamw/impl=multi_tensor/clip=1.0/schedule=linear"},
        {"model": "twins", "dtype": "mixed_fp16/master=fp32", "optimizer": "adamw/impl=multi_tensor/loss_scale=256.0",
         "program": "build step overflow overflow step step step"},
        {"mesh": "2x2x1", "model": "many", "options": "overlap_grad_reduce+overlap_param_gather"},
        {"mesh": "1x4x1", "model": "moe", "expert_parallel": "2"},
        {"mesh": "1x4x1", "model": "moe", "expert_parallel": "4", "dtype": "fp32"},
        {"model": "groups", "sharding": "replicate", "checkpoint": "plain", "optimizer": "sgd/impl=multi_tensor"},
        {"model": "later", "sharding": "replicate", "checkpoint": "plain", "dtype": "fp16/master=fp32"},
        {"offload": "cpu=0.5"},
        {"offload": "cpu", "dtype": "fp16/master=fp32", "optimizer": "adamw/impl=multi_tensor/loss_scale=256.0"},
        {"offload": "cpu=0.5", "options": "overlap_offload+precision_aware", "microbatches": "2"},
        {"options": "precision_aware", "dtype": "mixed/master=fp32/exp_avg=bf16/exp_avg_sq=bf16", "model": "twins"},
        {"optimizer": "adamw/impl=forloop", "model": "tied"},
        {"mesh": "1x2x2", "model": "gpt", "options": "overlap_grad_reduce+overlap_param_gather"},
        {"model": "gpt", "sharding": "replicate", "checkpoint": "plain", "optimizer": "adamw/impl=forloop"},
        {"model": "frozen_tower", "program": "resume"},
        {"model": "tied", "program": "model_only"},
    ],
    ids=str,
)  # fmt: skip
def test_state_equals_the_twin_bit_for_bit(laboratory: Laboratory, tmp_path: Path, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert SYSTEM.refusal(scenario) is None
    judgement = assert_equals_the_twin(laboratory, scenario, tmp_path)
    assert "device=cuda in torch.zeros" in judgement["emulated"]


@pytest.mark.real
def test_observing_changes_nothing(laboratory: Laboratory, tmp_path: Path) -> None:
    """With parameters of two dtypes, clipping, and reductions and gathers that overlap."""
    axes = {"model": "twins", "dtype": "mixed/master=fp32", "optimizer": "adamw/impl=multi_tensor/clip=1.0"}
    options = {"options": "overlap_grad_reduce+overlap_param_gather", "program": "build step step step step"}
    scenario = BASE.with_axes({**axes, **options})
    assert_observing_changes_nothing(laboratory, scenario, tmp_path)


def test_the_variant_is_what_the_library_finds_beside_it() -> None:
    assert SYSTEM.variant(BASE) == "apex"
    assert SYSTEM.variant(BASE.with_axes({"optimizer": "adamw/impl=forloop"})) == "plain"
    assert SYSTEM.variant(BASE.with_axes({"options": "precision_aware"})) == "te"


def test_overlap_is_not_exercised_on_a_device_whose_streams_do_nothing() -> None:
    scenario = BASE.with_axes({"options": "one_bucket+overlap_grad_reduce+overlap_param_gather"})
    assert [said.partition(":")[0] for said in SYSTEM.not_exercised(scenario)] == [
        "overlap_grad_reduce",
        "overlap_param_gather",
    ]
    assert SYSTEM.not_exercised(BASE) == ()


def test_options_are_documented() -> None:
    assert all(doc for doc in SYSTEM.accepts.options.values())
    assert SYSTEM.refusal(BASE.with_axes({"options": "no_such_switch"}))


@pytest.mark.parametrize("model", sorted(zoo()))
def test_every_model_of_the_zoo_has_a_supported_scenario(model: str) -> None:
    refused = SYSTEM.refusal(BASE.with_axes({"model": model}))
    assert refused == {
        "opaque": "megatron-core has no modules with bytes of their own that only the reference makes",
        "quantised": "megatron-core has no modules with fp8 weights beside the parameters that the optimizer steps",
    }.get(model)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"sharding": "fully_shard"}, "zero1"),
        ({"dtype": "bf16"}, "masters"),
        ({"dtype": "fp32/reduce=bf16"}, "reduced"),
        ({"optimizer": "adamw/impl=multi_tensor/loss_scale=64.0"}, "fp16"),
        ({"version": "0.15.3", "model": "groups"}, "0.16"),
        ({"version": "0.14.0", "optimizer": "adam/impl=multi_tensor"}, "AdamW"),
        ({"model": "moe", "expert_parallel": "2", "mesh": "1x2x2"}, "tensor parallelism"),
        ({"mesh": "1x1x5"}, "divide"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_with_its_reason(axes: dict[str, str], reason: str) -> None:
    assert reason in (SYSTEM.refusal(BASE.with_axes(axes)) or "")
