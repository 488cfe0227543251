"""Switches of the `options` axis that Megatron-Core alone has: its own Megatron-FSDP. Values only."""

from __future__ import annotations

from shardproof.mechanisms.megatron.switches import OPTIONS as SHARED
from shardproof.scenario import Scenario

OPTIONS: dict[str, str] = {
    **SHARED,
    "fsdp_no_shard": "Megatron-FSDP in place of DDP, sharding nothing",
    "fsdp_optim": "Megatron-FSDP in place of DDP, sharding optimizer state (data_parallel_sharding_strategy=optim)",
    "fsdp_optim_grads": "Megatron-FSDP, sharding optimizer state and gradients",
    "fsdp_optim_grads_params": "Megatron-FSDP, sharding parameters too; every module is a unit",
    "local_state": "FusedAdam keeps the state of DTensors as plain local tensors, as TransformerEngine's did between "
    "its pull requests 2698 and 2795 (March and April 2026)",
}
"""Switch → what it does."""


def under_fsdp(scenario: Scenario) -> bool:
    """Whether the model is sharded by Megatron-FSDP, not by DDP."""
    return any(word.startswith("fsdp_") for word in scenario.options)


def fsdp_strategies(scenario: Scenario) -> list[str]:
    """Every `data_parallel_sharding_strategy` that the options ask for. A scenario may name one; `accepts` refuses
    more."""
    return [word.removeprefix("fsdp_") for word in scenario.options if word.startswith("fsdp_")]


def fsdp_strategy(scenario: Scenario) -> str | None:
    """Megatron-FSDP's `data_parallel_sharding_strategy`; None where the scenario is one of DDP."""
    return next(iter(fsdp_strategies(scenario)), None)
