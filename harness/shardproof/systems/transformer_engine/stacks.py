"""TransformerEngine's checkpoints, as stacks that crashes and damage are tried on."""

from __future__ import annotations

from shardproof.resilience.stacks import stack_of_system

STACKS = (
    stack_of_system(
        "transformer-engine", "FusedAdam's state of FSDP2 through dcp.save: a folder for each step, a file says which",
        "transformer-engine", {"dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor"},
        tracker="latest.txt", by_script=True,
    ),
)  # fmt: skip
