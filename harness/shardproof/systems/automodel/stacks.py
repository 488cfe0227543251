"""Automodel's checkpoints, as stacks that crashes and damage are tried on."""

from __future__ import annotations

from shardproof.resilience.stacks import stack_of_system

STACKS = (
    stack_of_system(
        "automodel", "Automodel's Checkpointer, a model in safetensors: a folder for each step, a file says which",
        "automodel", {"model": "hf_delta", "checkpoint": "safetensors"}, tracker="latest.txt", by_script=True,
    ),
)  # fmt: skip
