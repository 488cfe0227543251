"""Fused projections under DistributedDataParallel: matrices in the library, stacks of sections in the model's spec."""

from __future__ import annotations

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.space.defaults import completed
from shardproof.systems.megatron_core import SYSTEM
from shardproof.verdict import Verdict


@pytest.mark.real
@pytest.mark.parametrize(
    ("sharding", "checkpoint"), [("zero1", "dp_zero"), pytest.param("replicate", "plain", marks=pytest.mark.nightly)]
)
def test_what_ranks_hold_of_fused_projections_is_compared(
    sharding: str, checkpoint: str, laboratory: Laboratory
) -> None:
    stated = {"system": SYSTEM.name, "model": "gated", "mesh": "1x2x1", "sharding": sharding, "program": "build step"}
    stated |= {"checkpoint": checkpoint}
    result = laboratory.examine_one(completed(stated), confirm=False)
    assert result.verdict is Verdict.PASS, result.reason or result.signature


def test_what_the_reader_does_not_tell_apart_is_refused() -> None:
    stated = {"system": SYSTEM.name, "model": "gated", "mesh": "1x2x1", "sharding": "zero1", "checkpoint": "dp_zero"}
    assert "fsdp_dtensor checkpoints alone" in (SYSTEM.refusal(completed(stated)) or "")
