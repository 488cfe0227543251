"""Defects of a library that make a Megatron-Core rank hold something unheard of are differences, never `unknown`.

*Verifies*: each planted defect shows as what it is, and the same scenario without it passes. One of them is a
Megatron-FSDP that cuts its buckets elsewhere and agrees with itself: where a rank's rows lie is our arithmetic, not
what the library says. *Does not verify*: defects of releases, which have regressions.
"""

from __future__ import annotations

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.scenario import Mesh, Scenario
from shardproof.verdict import Verdict

from tests.conformance.megatron_core.defects import (
    CUTS_ELSEWHERE,
    DEFECTIVE,
    FORGETS,
    LOSES,
    OFFLOADS_NOTHING,
    REBINDS,
)

pytestmark = pytest.mark.real

BASE = Scenario(system=DEFECTIVE.name, sharding="zero1", checkpoint="dp_zero", mesh=Mesh(1, 2, 1)).with_axes(
    {
        "dtype": "bf16/reduce=fp32/master=fp32",
        "optimizer": "adamw/impl=multi_tensor",
        "program": "build step save step load",
    }
)
FSDP = {
    "checkpoint": "fsdp_dtensor", "model": "dense", "dtype": "bf16/master=fp32", "options": "fsdp_optim_grads_params",
    "program": "build step",
}  # fmt: skip
OFFLOADED = {"offload": "cpu", "optimizer": "adamw/impl=forloop", "program": "train"}


@pytest.mark.parametrize(
    ("seed", "axes", "found"),
    [
        (0, {}, set()),
        (REBINDS, {}, {("size", "master"), ("size", "exp_avg"), ("size", "exp_avg_sq")}),
        (LOSES, {"program": "build step"}, {("extra", "param"), ("gap", "master")}),
        (0, OFFLOADED, set()),
        (OFFLOADS_NOTHING, OFFLOADED, {("bits", "host")}),
        (FORGETS, {"mesh": "2x1x1"}, {("gap", "step")}),
        (0, FSDP, set()),
        (CUTS_ELSEWHERE, FSDP, {(kind, role) for kind in ("gap", "overlap") for role in ("param", "master", "grad")}),
    ],
    ids=["sound", "rebinds", "loses", "sound-offload", "offloads-nothing", "forgets", "sound-fsdp", "cuts-elsewhere"],
)
def test_a_defect_is_a_difference(
    laboratory: Laboratory, seed: int, axes: dict[str, str], found: set[tuple[str, str]]
) -> None:
    result = laboratory.examine_one(BASE.with_axes({"seed": str(seed), **axes}))
    assert result.verdict is (Verdict.MISMATCH if found else Verdict.PASS), result
    assert found <= {(d.kind, d.key.role) for d in result.differences}
