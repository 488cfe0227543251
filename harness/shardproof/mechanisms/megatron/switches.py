"""Switches of the `options` axis that the systems over Megatron-Core share, and numbers of their set-up. Values
only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardproof.scenario import Optimizer, Scenario

NEW_DECAY = "new_decay"
ONE_BUCKET = "one_bucket"
OVERLAP = "overlap_grad_reduce"
OVERRIDE = "override_scheduler"
TORCH_OFFLOAD = "torch_offload"

OPTIONS: dict[str, str] = {
    "average_in_collective": "DDP averages in the collective instead of scaling before it",
    NEW_DECAY: "every later build asks for another weight decay, which a load must replace by the checkpoint's",
    "no_initialization": "layers skip their own initialisation (perform_initialization), as before a load",
    ONE_BUCKET: "DDP's default bucket size, which holds a whole tiny model, in place of small buckets",
    OVERLAP: "DDP reduces each bucket of gradients as soon as it is ready",
    "overlap_offload": "the host's part of the optimizer steps parameter by parameter (overlap_cpu_optimizer_d2h_h2d)",
    OVERRIDE: "override_opt_param_scheduler: a load leaves the run its own learning rate and weight decay",
    "overlap_param_gather": "DDP gathers parameters bucket by bucket in the next forward",
    "precision_aware": "use_precision_aware_optimizer: masters and moments live in FusedAdam, in dtypes of their own",
    TORCH_OFFLOAD: "use_torch_optimizer_for_cpu_offload",
}
"""Switch of the `options` axis → what it does."""

BUCKET_SIZE = 48
"""Elements after which DDP closes a bucket: so few that even a tiny model has several. The library looks at it only
with overlap_grad_reduce; without that, a buffer is one bucket."""


def several_buckets(options: Sequence[str]) -> bool:
    """Whether a tiny model's gradients fall into more than one bucket."""
    return OVERLAP in options and ONE_BUCKET not in options


GPT_MODEL = "gpt"
"""The model that is a real GPTModel; all others are trees of MegatronModule with hand-registered parameters."""


def variant(scenario: Scenario) -> str:
    """Which environment a scenario's ranks need: with the emulated apex (`apex`), with the emulated optimizer of
    TransformerEngine beside it (`te`), or with neither (`plain`). The library looks for them once, when imported."""
    if scenario.optimizer.impl == "forloop":
        return "plain"
    return "te" if "precision_aware" in scenario.options else "apex"


def not_exercised(scenario: Scenario) -> tuple[str, ...]:
    """What the scenario asks for that ranks without a GPU cannot put to the test."""
    asked = [word for word in scenario.options if word.startswith("overlap_") and scenario.device == "cpu"]
    return tuple(f"{word}: streams and events of the emulated device do nothing" for word in asked)


def hyperparameters(scenario: Scenario, init_seed: int) -> Optimizer:
    """The hyperparameters that a build starts with.

    All builds ask for the same weight decay, unless the scenario has the switch `new_decay`. Megatron does not restore
    the decay at a load, which is one known defect (7468); if every scenario showed it, it would hide others.
    """
    asked = scenario.optimizer.at_build(init_seed)
    return asked if NEW_DECAY in scenario.options else replace(asked, weight_decay=scenario.optimizer.weight_decay)
