"""The reference as the parent sees it: every scenario that the space allows, in lockstep, in one process."""

from __future__ import annotations

from harness.scenario import Scenario
from harness.systems.protocol import SystemInfo
from harness.systems.registry import register

CHECKPOINTS = ("gathered", "bucket_space", "model_space", "sharded")


def unsupported(scenario: Scenario) -> str | None:
    """Why the reference does not run a scenario, or None."""
    if scenario.checkpoint not in CHECKPOINTS:
        return f"checkpoint format {scenario.checkpoint!r} is not one of the reference's: {', '.join(CHECKPOINTS)}"
    if scenario.checkpoint == "bucket_space" and scenario.sharding != "zero1":
        return "bucket_space stores flat buckets, which only zero1 has"
    return None


INFO = register(
    SystemInfo(
        name="reference",
        doc="our full sharded optimizer in lockstep over simulated ranks (zero1 and fully_shard)",
        world="lockstep",
        entry="harness.reference.system:run",
        unsupported=unsupported,
    )
)
