"""What DeepSpeed's ZeRO promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from shardproof.models import ModuleSpec
from shardproof.oracle.contract import Clause, Contract, half_dtype
from shardproof.oracle.inputs import Clip, LossScale, Rule
from shardproof.scenario import FLOAT_DTYPES, Mesh, Scenario
from shardproof.versions import before

WINDOW = 2
"""Steps without overflow after which the loss scale doubles, in every scenario."""

NO_HYSTERESIS = "no_hysteresis"

NO_SCHEDULE = "no_scheduler_states"
"""The switch for a load without the states of the schedule."""

OWN_SCHEDULES = ("linear", "cosine", "warmup")
"""Schedules of the `optimizer` axis for which the library has a class of its own."""

SHARE = "shardproof.systems.deepspeed.schedule:share"

INVERSE_CLIPPING = Rule(
    "shardproof.systems.deepspeed.clipping:by_inverse", "shardproof.systems.deepspeed.reference:clip_by_inverse"
)
"""Gradients are always multiplied, by the inverse of max(1, (norm + 1e-6) / bound), computed in the norm's dtype."""

DIRECT_CLIPPING = Rule(
    "shardproof.systems.deepspeed.clipping:directly", "shardproof.systems.deepspeed.reference:clip_directly"
)
"""Gradients are multiplied by bound / (norm + 1e-6), computed in fp32, if that is below 1."""

STABLE_INTERVALS = Rule(
    "shardproof.systems.deepspeed.scaler:count", "shardproof.systems.deepspeed.reference:count_scale"
)
"""The loss scale doubles in the step after a whole number of windows without overflow."""

EARLY_INTERVALS = Rule(
    "shardproof.systems.deepspeed.scaler:count_early", "shardproof.systems.deepspeed.reference:count_scale_early"
)
"""The loss scale doubles in the last step of each window without overflow: releases before 0.17."""


class DeepSpeedContract(Contract):
    """fp32 masters in flat buffers, gradients of zeros for what is unused, and a loss scaler in fp16 only."""

    clauses: ClassVar[Sequence[Clause]] = (
        Clause(
            "the optimizer steps fp32 masters, whatever dtype the model is in; in fp32 without offload, stage 3 steps "
            "the parameters themselves",
            "deepspeed.runtime.zero.stage_1_and_2, single_partition_of_fp32_groups; stage3._create_fp32_partitions",
        ),
        Clause(
            "gradients are accumulated in data_types.grad_accum_dtype and reduced in communication_data_type, by "
            "default both in the model's dtype, and averaged over the ranks; the optimizer reads them in fp32",
            "https://www.deepspeed.ai/docs/config-json, Data Type options",
        ),
        Clause(
            "several backward passes before one step all count, whoever says where accumulation ends, or are refused",
            "https://github.com/deepspeedai/DeepSpeed/pull/7981, which repaired it with offload",
        ),
        Clause(
            "gradients are unscaled and clipped by one multiplication with the inverse of the loss scale times "
            "max(1, (norm + 1e-6) / bound), computed in fp32, and by stage 3 without offload in double precision",
            "deepspeed.runtime.zero.stage_1_and_2 and stage3, unscale_and_clip_grads",
        ),
        Clause(
            "stage 1 in bf16 with gradients in fp32 has an optimizer of its own, which multiplies by "
            "bound / (norm + 1e-6) in fp32 if that is below 1",
            "deepspeed.runtime.bf16_optimizer; deepspeed.runtime.utils, clip_tensors_by_global_norm",
        ),
        Clause(
            "the dynamic loss scale exists in fp16 only. After each window of steps without overflow the next step "
            "doubles it, before 0.17 the last of the window; an overflow takes one of the hysteresis, or halves the "
            "scale once one is left",
            "deepspeed.runtime.fp16.loss_scaler, DynamicLossScaler.update_scale",
        ),
        Clause(
            "a step divides its gradients by the scale that its loss was multiplied with",
            "https://www.deepspeed.ai/docs/config-json, FP16 training options",
        ),
        Clause(
            "every trainable parameter has a gradient, zeros where no forward used it; frozen ones the optimizer lacks",
            "deepspeed.runtime.zero.config, ignore_unused_parameters",
        ),
        Clause(
            "buffers keep their dtype from 0.19.2 on; before, those of floats were cast with the model",
            "deepspeed.runtime.engine, _cast_module_mixed_precision",
        ),
        Clause(
            "a schedule of the library's own keeps the number of its last step and nothing else: after a load its next "
            "step takes the rates that the run itself was configured with, of each param group its own",
            "deepspeed.runtime.lr_schedules, state_dict",
        ),
        Clause(
            "loading the module alone also refreshes the masters from it; from a universal checkpoint it loads the "
            "masters, and nothing else of the optimizer",
            "deepspeed.runtime.engine, load_checkpoint with load_module_only",
        ),
    )
    zero_gradients = True
    trainable_only = True
    owner_groups = True
    load_refreshes = True
    sharded_masters = True

    def master(self, scenario: Scenario, storage: str) -> str | None:
        itself = scenario.sharding == "fully_shard" and storage == "fp32" and not scenario.offload.fraction
        return None if itself else "fp32"

    def run_keeps(self, scenario: Scenario) -> tuple[str, ...]:
        own = ("initial_lr",) if scenario.optimizer.schedule in OWN_SCHEDULES else ()
        return (*own, "schedule") if NO_SCHEDULE in scenario.options else own

    def schedule_share(self, scenario: Scenario) -> str:
        return SHARE if scenario.optimizer.schedule in OWN_SCHEDULES else ""

    def buffer_dtype(self, scenario: Scenario, dtype: str, module: ModuleSpec, mesh: Mesh) -> str:
        half = half_dtype(scenario.dtype)
        return half if half and dtype in FLOAT_DTYPES and before(scenario.version, "0.19.2") else dtype

    def masters_in_model(self, scenario: Scenario) -> bool:
        """A universal checkpoint has no other copy of the model."""
        return scenario.checkpoint == "universal"

    def loss_scale(self, scenario: Scenario) -> LossScale | None:
        if not scenario.optimizer.loss_scale or scenario.dtype.storage != "fp16":
            return None
        return LossScale(
            torch=False,
            window=WINDOW,
            hysteresis=hysteresis(scenario),
            minimum=1.0,
            rule=EARLY_INTERVALS if before(scenario.version, "0.17") else STABLE_INTERVALS,
        )

    def clip(self, scenario: Scenario) -> Clip | None:
        bound = scenario.optimizer.clip
        if not bound:
            return None
        if takes_bf16_optimizer(scenario):
            return Clip(bound, "fp32", DIRECT_CLIPPING)
        in_double = scenario.sharding == "fully_shard" and not scenario.offload.fraction
        return Clip(bound, "fp64" if in_double else "fp32", INVERSE_CLIPPING)

    def reference_sharding(self, scenario: Scenario) -> str:
        return "zero1"


def takes_bf16_optimizer(scenario: Scenario) -> bool:
    """Whether the engine takes BF16_Optimizer, which is another class than the rest of stages 1 and 2."""
    precise = scenario.dtype.storage == "bf16" and scenario.dtype.reduce == "fp32"
    return precise and scenario.sharding == "zero1" and not scenario.offload.fraction


def hysteresis(scenario: Scenario) -> int:
    """Overflows that it takes to halve the loss scale; 2 is the library's default."""
    return 1 if NO_HYSTERESIS in scenario.options else 2


CONTRACT = DeepSpeedContract()
