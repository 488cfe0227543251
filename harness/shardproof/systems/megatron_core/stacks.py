"""Megatron-Core's checkpoints, as stacks that crashes and damage are tried on."""

from __future__ import annotations

from shardproof.resilience.stacks import Stack, stack_of_system

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in which megatron/training/checkpointing.py writes the newest iteration, after the save."""


def _stack(name: str, doc: str, checkpoint: str) -> Stack:
    axes = {
        "sharding": "zero1", "dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor",
        "checkpoint": checkpoint,
    }  # fmt: skip
    doc = f"{doc}: a folder for each step, a file says which is the newest"
    return stack_of_system(name, doc, "megatron-core", axes, tracker=TRACKER, by_script=True)


STACKS = (
    _stack("megatron-dist", "dist_checkpointing.save, fully_reshardable", "fully_reshardable"),
    _stack("megatron-dist-async", "an async dist_checkpointing.save, fully_reshardable", "fully_reshardable+async"),
    _stack("megatron-dp-zero", "Megatron's older format, a file of the optimizer from rank 0", "dp_zero"),
)
