"""Our own full sharded optimizer, run in lockstep over simulated ranks: `shardproof.reference` as a system under test.

It has no ranks of its own, and its checkpoints stay in memory, so it has no `stored`. Its format on disk
(`shardproof.reference.files`) is a stack that crashes and damage are tried on (`stacks`).
"""

from __future__ import annotations

from shardproof.protocol.system import System

SYSTEM = System(
    name="reference",
    doc="our full sharded optimizer in lockstep over simulated ranks (zero1, replicate and fully_shard)",
    home=__name__,
    world="lockstep",
    stored_entry="",
    rank="",
    models_entry="models:MODELS",
)
