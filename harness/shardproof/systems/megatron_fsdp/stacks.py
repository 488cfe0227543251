"""Megatron-FSDP's checkpoints, as stacks that crashes and damage are tried on."""

from __future__ import annotations

from shardproof.resilience.stacks import stack_of_system

STACKS = (
    stack_of_system(
        "megatron-fsdp", "Megatron-FSDP's state through dcp.save: a folder for each step, a file says which",
        "megatron-fsdp", {"dtype": "bf16/master=fp32"}, tracker="latest.txt", by_script=True,
    ),
)  # fmt: skip
