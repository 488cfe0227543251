"""DeepSpeed's checkpoints, as stacks that crashes and damage are tried on."""

from __future__ import annotations

from shardproof.resilience.stacks import stack_of_system

STACKS = (
    stack_of_system(
        "deepspeed", "DeepSpeed's save_checkpoint under ZeRO 1: a folder for each step, `latest` says which",
        "deepspeed", {"sharding": "zero1", "dtype": "bf16", "checkpoint": "zero"}, tracker="latest",
    ),
    stack_of_system(
        "deepspeed-3", "DeepSpeed's save_checkpoint under ZeRO 3: a folder for each step, `latest` says which",
        "deepspeed", {"sharding": "fully_shard", "dtype": "bf16", "checkpoint": "zero"}, tracker="latest",
    ),
)  # fmt: skip
