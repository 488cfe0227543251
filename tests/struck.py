"""Which scenarios the systems plant a boundary fault in."""

from __future__ import annotations

from harness.faults.strikes import strikes
from harness.scenario import Scenario

REORDER = "boundary.collective-reorder"
"""No system has two collectives under way at once on the CPU: `tests/unit/test_overlap.py` strikes ranks of its own."""


def strikes_with(fault: str) -> list[Scenario]:
    """The scenarios with this fault in them, in the systems' order."""
    return [scenario for scenario in strikes() if scenario.faults == (fault,)]
