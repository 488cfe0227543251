"""TransformerEngine's FusedAdam, its Python unmodified, as the optimizer that Megatron-FSDP shards.

It steps either the library's main parameters, or, precision-aware, the model's own parameters. In that case the masters
are a part of its state: of a bf16 parameter's master it keeps only the 16 bits that the parameter lacks, and its
moments may be narrower than fp32. Steps are counted by group.

*Verifies* nothing by itself. *Does not exercise* the compiled kernels, CUDA graphs, moments and masters with a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.emulation.kernels import join_remainder
from shardproof.mechanisms.fused_adam import PRECISION_AWARE
from shardproof.mechanisms.probe_module import TORCH_DTYPE, local_part
from shardproof.scenario import Optimizer, Scenario
from shardproof.systems.megatron_fsdp.contract import CONTRACT

MASTER = "master_param"


def fused_adam(scenario: Scenario, ask: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """FusedAdam as the scenario wants it, over param groups."""
    from transformer_engine.pytorch.optimizers import FusedAdam  # type: ignore[import-not-found]

    policy = scenario.dtype
    owns = PRECISION_AWARE in scenario.options and policy.master is not None
    optimizer: torch.optim.Optimizer = FusedAdam(
        groups, lr=ask.lr, betas=(ask.beta1, ask.beta2), eps=ask.eps, weight_decay=ask.weight_decay,
        adam_w_mode=ask.kind == "adamw", use_decoupled_grad=CONTRACT.reads_decoupled(scenario), master_weights=owns,
        store_param_remainders=owns, exp_avg_dtype=TORCH_DTYPE[policy.exp_avg or "fp32"],
        exp_avg_sq_dtype=TORCH_DTYPE[policy.exp_avg_sq or "fp32"],
    )  # fmt: skip
    return optimizer


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    """`(name, value)` of what FusedAdam keeps of a parameter's shard: the master as it is stepped, and its group's
    number of steps as `step`."""
    own, state = local_part(parameter.detach()), optimizer.state.get(parameter, {})
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        yield name, join_remainder(own, local) if local.dtype is torch.int16 else local
    for group in optimizer.param_groups if state else ():
        if "step" in group and any(p is parameter for p in group["params"]):
            yield "step", torch.tensor(float(group["step"]))


def refresh_master(optimizer: Any, parameter: nn.Parameter) -> None:
    """Set a master that exists to the value that its parameter has now."""
    state = optimizer.state.get(parameter, {})
    if MASTER in state:
        own = local_part(parameter.detach())
        kept = state[MASTER].dtype is torch.int16
        optimizer.set_scaled_state(parameter, MASTER, torch.zeros_like(own, dtype=torch.int16) if kept else own.float())
