"""Which scenarios the systems plant a boundary fault in."""

from __future__ import annotations

from shardproof.faults.plain_scenario import strikes
from shardproof.scenario import Scenario

REORDER = "boundary.collective-reorder"
"""No system has two collectives under way at once on the CPU; `tests/unit/faults/test_overlap.py` has ranks for it."""


def strikes_with(fault: str) -> list[Scenario]:
    """The scenarios with this fault in them, in the systems' order."""
    return [scenario for scenario in strikes() if scenario.faults == (fault,)]
