"""Which scenarios Megatron-Bridge runs: those of Megatron-Core in which a model is finetuned."""

from __future__ import annotations

from shardproof.mechanisms import fused_adam
from shardproof.mechanisms.megatron import limits as megatron
from shardproof.mechanisms.megatron.switches import OPTIONS, not_exercised, variant
from shardproof.models import model_spec
from shardproof.protocol.accepts import Accepts, Faults, Formats, Limit, Only, Operations, Words
from shardproof.systems.megatron_bridge.contract import CONTRACT

__all__ = ["ACCEPTS", "CHECKPOINTS", "LIMITS", "not_exercised", "variant"]

CHECKPOINTS = {"weights": ("fully_parallel",)}
"""Bridge's torch_dist format without the optimizer, as a converted pretrained model has none, and with random
generators where the model draws from some; with `fully_parallel` data-parallel ranks share the writing
(`fully_parallel_save`, Bridge's default)."""

LIMITS: tuple[Limit, ...] = (
    *megatron.limits(CONTRACT),
    Limit(
        "offload-l2",
        lambda s: s.offload.fraction > 0 and s.optimizer.kind == "adam",
        "offload steps with AdamW only",
        "megatron/core/optimizer/__init__.py, _get_megatron_optimizer_based_on_param_groups",
    ),
    Limit(
        "stacked",
        lambda s: any(named.spec.stacked for named in model_spec(s.model).params),
        "weights whose sections are stacked are for fsdp_dtensor checkpoints, which megatron-core covers",
    ),
)

ACCEPTS = Accepts(
    "megatron-bridge",
    keeps=("draws",),
    limits=LIMITS,
    constraints=(*fused_adam.constraints(CONTRACT), *megatron.constraints(CONTRACT)),
    features=(),
    **megatron.AXES
    | {
        "checkpoint": Formats(CHECKPOINTS),
        "expert_parallel": Only(1, because="expert parallelism is driven through megatron-core"),
        "options": Words(OPTIONS),
        "program": Operations(
            ("build", "step", "overflow", "save", "load_model_only", "reload_params"),
            because="it is driven where it finetunes; resuming calls the optimizer's load_state_dict, which "
            "megatron-core covers",
        ),
        "faults": Faults(),
    },
)
