"""Our own full sharded optimizer, run in lockstep over simulated ranks: `harness.reference` as a system under test.

It has no ranks of its own and stores nothing in files, so it has neither `rank` nor `stored`.
"""

from __future__ import annotations

from harness.systems.protocol import System

SYSTEM = System(
    name="reference",
    doc="our full sharded optimizer in lockstep over simulated ranks (zero1, replicate and fully_shard)",
    home=__name__,
    world="lockstep",
    stored_entry="",
    rank="",
    models_entry="models:MODELS",
)
