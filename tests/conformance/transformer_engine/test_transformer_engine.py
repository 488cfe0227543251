"""TransformerEngine's layers and FusedAdam under real FSDP2 and DCP against the twin, bit for bit.

*Verifies*: a sample of scenarios on the newest release; that the extension's kind is told. What the library refuses,
the conformance kit asks it (`test_kit.py`).
*Does not verify*: anything that needs the compiled extension.
"""

from __future__ import annotations

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.scenario import Scenario
from shardproof.systems.transformer_engine import SYSTEM
from shardproof.verdict import Verdict

pytestmark = pytest.mark.real

BASE = Scenario(system=SYSTEM.name).with_axes({"mesh": "1x2x1"})
FUSED = {"optimizer": "adamw/impl=multi_tensor"}

SOUND: tuple[dict[str, str], ...] = (
    {**FUSED, "model": "te_transformer", "dtype": "bf16/master=fp32", "options": "remainders"},
    {**FUSED, "model": "te_layers", "load": "grow", "options": "meta+no_extra_state"},
    {**FUSED, "model": "te_layers", "dtype": "bf16/master=fp32", "options": "fp8_current"},
)
MORE_SOUND: tuple[dict[str, str], ...] = (
    {**FUSED, "model": "te_layers", "dtype": "bf16/master=fp32", "options": "fp8_delayed+meta", "load": "shrink"},
    {**FUSED, "model": "te_no_bias", "mesh": "2x2x1", "dtype": "bf16/master=fp32", "options": "fp8_current"},
    {
        **FUSED,
        "model": "te_layers",
        "dtype": "bf16/master=fp32",
        "options": "fp8_current+meta",
        "checkpoint": "dcp-async",
    },
    {**FUSED, "model": "te_attention", "mesh": "1x4x1", "dtype": "bf16/master=fp32", "options": "fp8_delayed"},
    {**FUSED, "model": "te_layers", "program": "rollback", "options": "calibrating"},
    {"model": "te_transformer", "options": "calibrating+no_extra_state"},
    {**FUSED, "mesh": "2x2x1", "load": "grow", "dtype": "bf16/master=fp16/exp_avg=fp16/exp_avg_sq=fp16"},
    {"optimizer": "adamw/impl=multi_tensor/loss_scale=1024.0", "dtype": "bf16/master=fp16", "program": "overflow"},
    {**FUSED, "mesh": "1x2x2", "program": "model_only_late", "dtype": "bf16/master=fp16/exp_avg_sq=fp16"},
    {"model": "te_transformer", "mesh": "1x2x2", "program": "build", "options": "meta+tags"},
    {**FUSED, "program": "twice", "dtype": "fp32/exp_avg=fp16", "checkpoint": "full", "options": "again"},
    {"model": "te_attention", "mesh": "1x3x1", "load": "shrink", "dtype": "fp32/param=bf16/reduce=fp32"},
    {**FUSED, "model": "te_grouped", "mesh": "2x2x1", "load": "1x4x1", "options": "meta"},
    {**FUSED, "dtype": "bf16/master=fp32/exp_avg=bf16/exp_avg_sq=bf16", "checkpoint": "dcp-async"},
    {**FUSED, "model": "short", "mesh": "1x2x2", "load": "1x4x1", "dtype": "bf16/master=fp32"},
    {**FUSED, "model": "te_layers", "program": "model_only_late", "dtype": "fp16/master=fp32", "offload": "cpu"},
    {"optimizer": "adam/impl=multi_tensor/schedule=halve/clip=1.0", "model": "groups", "program": "load_after_step"},
    {"optimizer": "adamw/impl=multi_tensor/loss_scale=1024.0", "dtype": "bf16/master=fp32", "program": "overflow"},
    {"optimizer": "adamw/impl=multi_tensor/groups=one/schedule=halve", "options": "capturable", "checkpoint": "full"},
)


@pytest.mark.parametrize(
    "axes", [*SOUND, *(pytest.param(axes, marks=pytest.mark.nightly) for axes in MORE_SOUND)], ids=str
)
def test_state_equals_the_twin_bit_for_bit(axes: dict[str, str], laboratory: Laboratory) -> None:
    result = laboratory.examine_one(BASE.with_axes(axes))
    assert result.verdict is Verdict.PASS, result.signature or result.reason
    assert any("transformer_engine_torch" in line for line in result.emulated)
    assert result.chosen["compiled extension"].startswith("emulated")
