"""Real ranks on a real GPU: what is chosen is what result and docs say, and the simplest scenarios pass."""

from __future__ import annotations

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.scenario import Mesh, Scenario
from shardproof.verdict import Verdict

BASE = Scenario(
    system="torch-fsdp2", device="cuda", mesh=Mesh(1, 2, 1), model="twins", program="build step save build load step"
)


@pytest.mark.parametrize(
    "axes",
    [
        {"mesh": "1x1x1"}, {}, {"optimizer": "adamw/impl=fused/capturable=true"}, {"offload": "cpu"},
        {"mesh": "1x3x1"}, {"mesh": "1x2x2", "model": "dense"},
    ],
    ids=lambda axes: " ".join(axes.values()) or "two ranks",
)  # fmt: skip
def test_fsdp2(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(BASE.with_axes(axes))
    assert result.verdict is Verdict.PASS, result.signature
    assert result.emulated == ()
    assert "NCCL" in result.device
