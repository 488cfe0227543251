"""TransformerEngine's layers and FusedAdam under real FSDP2 and DCP against the twin, bit for bit; limits and versions.

*Verifies*: a sample of scenarios on the newest release; each deliberate refusal; that the extension's kind is told.
*Does not verify*: anything that needs the compiled extension.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.laboratory import Laboratory
from harness.scenario import Scenario
from harness.systems.transformer_engine import LIMITS
from harness.verdict import Verdict

pytestmark = pytest.mark.real

BASE = Scenario(system="transformer-engine").with_axes({"mesh": "1x2x1"})
FUSED = {"optimizer": "adamw/impl=multi_tensor"}

SOUND: tuple[dict[str, str], ...] = (
    {**FUSED, "model": "te_transformer", "dtype": "bf16/master=fp32", "options": "remainders"},
    {**FUSED, "model": "te_layers", "load": "grow", "options": "meta+no_extra_state"},
)
MORE_SOUND: tuple[dict[str, str], ...] = (
    {"model": "te_attention", "mesh": "1x3x1", "load": "shrink", "dtype": "fp32/param=bf16/reduce=fp32"},
    {**FUSED, "model": "te_grouped", "mesh": "2x2x1", "load": "1x4x1", "options": "meta"},
    {**FUSED, "dtype": "bf16/master=fp32/exp_avg=bf16/exp_avg_sq=bf16", "checkpoint": "dcp-async"},
    {**FUSED, "model": "short", "mesh": "1x2x2", "load": "1x4x1", "dtype": "bf16/master=fp32"},
    {**FUSED, "model": "te_layers", "program": "model_only_late", "dtype": "fp16/master=fp32", "offload": "cpu"},
    {"optimizer": "adam/impl=multi_tensor/schedule=halve/clip=1.0", "model": "groups", "program": "load_after_step"},
    {"optimizer": "adamw/impl=multi_tensor/groups=one/schedule=halve", "options": "capturable", "checkpoint": "full"},
)

RAISES: dict[str, dict[str, str]] = {
    "capturable-remainders": {**FUSED, "dtype": "bf16/master=fp32", "options": "capturable+remainders"},
    "tp-divides": {"model": "te_layers", "mesh": "1x1x4"},
}


@pytest.fixture(scope="module")
def opened() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=60.0) as laboratory:
        yield laboratory


@pytest.mark.parametrize(
    "axes", [*SOUND, *(pytest.param(axes, marks=pytest.mark.nightly) for axes in MORE_SOUND)], ids=str
)
def test_state_equals_the_twin_bit_for_bit(axes: dict[str, str], opened: Laboratory) -> None:
    result = opened.examine_one(BASE.with_axes(axes))
    assert result.verdict is Verdict.PASS, result.signature or result.reason
    assert any("transformer_engine_torch" in line for line in result.emulated)


def test_every_deliberate_refusal_is_tried() -> None:
    own = {limit.id for limit in LIMITS if limit.error and "transformer_engine" in limit.source}
    assert {*RAISES, "capturable-moments"} == own
