"""The reference's own checkpoints on disk, as a stack that crashes and damage are tried on."""

from __future__ import annotations

from shardproof.resilience.stacks import Stack

STACKS = (
    Stack(
        "reference", "the reference's format: a folder for each generation, committed by one rename, digests over all",
        "shardproof.systems.reference.rank.trial_checkpoints:Kept",
    ),
)  # fmt: skip
