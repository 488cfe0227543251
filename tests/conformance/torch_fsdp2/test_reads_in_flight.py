"""FSDP2's asynchronous save, held where one rank reads and the other waits for it in a collective of the save."""

from __future__ import annotations

import pytest
from shardproof.checks.boundary_faults import strike
from shardproof.protocol.registry import system_named

ONE_READS = (78, 84, 90)
"""Of the reads that rank 0 alone makes, mostly of the plans of all ranks, while rank 1 waits for its part of the whole
plan (torch 2.13.0, as of `faults --strike torch-fsdp2 --every`)."""


@pytest.mark.nightly
@pytest.mark.real
def test_the_copy_is_whole_and_the_live_tensors_are_not_where_one_rank_reads_alone() -> None:
    faults = [f"boundary.{fault}@{number}" for fault in ("async-late", "async-live") for number in ONE_READS]
    found, _ = strike([system_named("torch-fsdp2")], 1, (), lambda *_: None, only=faults)
    assert [(one.fault.id, one.outcome) for one in found] == [
        *((fault, "pass") for fault in faults[:3]),
        *((fault, "mismatch") for fault in faults[3:]),
    ]
