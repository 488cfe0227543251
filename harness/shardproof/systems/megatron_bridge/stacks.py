"""Megatron-Bridge's checkpoint of the weights, as a stack that crashes and damage are tried on."""

from __future__ import annotations

from dataclasses import replace

from shardproof.resilience.stacks import stack_of_system

STACKS = (
    replace(
        stack_of_system(
            "megatron-bridge", "Megatron-Bridge's save_checkpoint, the weights alone, loaded to finetune: a folder "
            "for each step, its trackers say which", "megatron-bridge",
            {"sharding": "zero1", "dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor"},
            tracker="latest_checkpointed_iteration.txt",
        ),
        driver="shardproof.systems.megatron_bridge.rank.stack:Weights",
    ),
)  # fmt: skip
