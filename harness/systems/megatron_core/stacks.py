"""Megatron-Core's checkpoints, as stacks that crashes and damage are tried on."""

from __future__ import annotations

from harness.resilience.stacks import stack_of_system

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in which megatron/training/checkpointing.py writes the newest iteration, after the save."""

STACKS = (
    stack_of_system(
        "megatron-dist",
        "dist_checkpointing.save, fully_reshardable: a folder for each step, a file says which is the newest",
        "megatron-core",
        {
            "sharding": "zero1", "dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor",
            "checkpoint": "fully_reshardable",
        },
        tracker=TRACKER, by_script=True,
    ),
)  # fmt: skip
