"""Megatron-FSDP, unmodified: what the parent knows of it. Imports no torch and no library.

Every entry of `LIMITS` with an `error` is a deliberate refusal of the library, checked against the real one by
tests/conformance/test_megatron_fsdp.py; entries without one have no meaning for this system. What else raises is a
crash, not a limit.
"""

from __future__ import annotations

from harness.models import model_spec
from harness.oracle.contracts import DECOUPLED, PRECISION_AWARE
from harness.program import meshes, operations
from harness.scenario import Scenario
from harness.systems.protocol import LibraryError, Limit, SystemInfo, first_reason
from harness.systems.registry import register

OPTIONS = {
    "average_in_collective": "DDP averages in the collective instead of scaling before it",
    DECOUPLED: "use_decoupled_grad, as the documentation asks for FusedAdam: it reads gradients as they were reduced",
    "fine_grained_gather": "enable_fine_grained_param_gather: gather by module instead of by unit",
    "meta": "init_model_with_meta_device: parameters get memory and values in the library, module by module",
    "neutral_start": "the optimizer is sharded with a learning rate and weight decay of 0, and its step counters are "
    "set to 0 afterwards, so that the library's step with gradients of zero leaves nothing behind",
    "no_main_params": "no main_params_dtype also where parameters are stored in fp32: no copy for the optimizer",
    "no_tp_dim": "no tp_dim: a mesh without a dim for tensor parallelism",
    "no_overlap_gather": "overlap_param_gather=False",
    "no_overlap_reduce": "overlap_grad_reduce=False",
    "one_call": "fully_shard, which takes the optimizer of the unsharded model, instead of a call for each",
    "outer_optim": "outer_dp_sharding_strategy=optim: on a hybrid mesh replicas share the optimizer's work",
    "step_syncs": "the optimizer's step is called without sync_grad_before_optimizer_step=False",
    PRECISION_AWARE: "FusedAdam with decoupled gradients keeps masters and moments in dtypes of its own; no main "
    "parameters",
}
STRATEGIES = {"fully_shard": "optim_grads_params", "zero2": "optim_grads", "zero1": "optim", "replicate": "no_shard"}
IN_PLACE = ("zero1", "replicate")
"""Shardings whose gradients are reduced inside the buffer that accumulates them."""


def fused(scenario: Scenario) -> bool:
    """Whether FusedAdam steps, not torch's optimizer."""
    return scenario.optimizer.impl == "multi_tensor"


def _decoupled(s: Scenario) -> bool:
    return not {DECOUPLED, PRECISION_AWARE}.isdisjoint(s.options)


def _reduced_twice(s: Scenario) -> bool:
    in_place = s.sharding in IN_PLACE or any(mesh.dp_replicate > 1 for mesh in meshes(s))
    return s.grad_sync == "every" and s.microbatches > 1 and in_place


LIMITS: tuple[Limit, ...] = (
    Limit(
        "sync-in-place",
        _reduced_twice,
        "reducing after every microbatch is for gradients that are not reduced where they accumulate: the library's "
        "documentation asks for a zero_grad in between under zero1, replicate and hybrid sharding",
        "megatron_fsdp README, sync_model_each_microbatch",
    ),
    Limit(
        "compute-dtype",
        lambda s: s.dtype.param is not None or s.dtype.output is not None,
        "parameters compute in the dtype they are stored in: there is no dtype of its own for the forward",
    ),
    Limit("gradient-reshard", lambda s: s.reshard_after_forward != "true", "units are released after their forward"),
    Limit("offload", lambda s: s.offload.fraction > 0, "Megatron-FSDP has no CPU offload of its own"),
    Limit("checkpoint", lambda s: s.checkpoint != "dcp", "its checkpoints are torch's distributed ones: dcp"),
    Limit(
        "fused-sgd",
        lambda s: fused(s) and s.optimizer.kind == "sgd",
        "FusedSGD reads no decoupled gradient: upstream drives FusedAdam",
    ),
    Limit(
        "decoupled-fused",
        lambda s: _decoupled(s) and not fused(s),
        "only FusedAdam reads a decoupled gradient: optimizer adamw/impl=multi_tensor",
    ),
    Limit(
        "decoupled-torch",
        lambda s: _decoupled(s) and bool(s.optimizer.clip or s.optimizer.loss_scale),
        "torch's clipping and GradScaler read Parameter.grad, where a decoupled gradient does not lie",
        "megatron_fsdp README, use_decoupled_grad",
    ),
    Limit(
        "scaled-state",
        lambda s: (
            "fp8e4m3" in (s.dtype.exp_avg, s.dtype.exp_avg_sq)
            or "fp16" in (s.dtype.exp_avg, s.dtype.exp_avg_sq)
            or (PRECISION_AWARE in s.options and s.dtype.master == "fp16")
        ),
        "masters in fp16, and moments in fp16 and fp8, have a scale for each rank's shard, which no oracle knows here",
    ),
    Limit("unfreeze", lambda s: "unfreeze" in operations(s.program), "trainable parameters are bucketed at the build"),
    Limit("schedule", lambda s: s.optimizer.schedule == "linear", "the linear schedule is Megatron's"),
    Limit(
        "options",
        lambda s: not set(s.options) <= set(OPTIONS),
        f"its switches are {', '.join(OPTIONS)}",
    ),
    Limit(
        "no-main-params",
        lambda s: "no_main_params" in s.options and (s.dtype.master is not None or s.dtype.storage != "fp32"),
        "no_main_params is for models stored in fp32",
    ),
    Limit(
        "outer-optim",
        lambda s: "outer_optim" in s.options and s.sharding != "fully_shard",
        "outer_dp_sharding_strategy=optim needs the parameters sharded within: fully_shard",
        "megatron_fsdp/fully_shard.py, fully_shard_model",
        LibraryError("ValueError", "Sharding with Hybrid (Fully) Sharded Data Parallel (HSDP) requires", "build"),
    ),
    Limit(
        "meta-replicate",
        lambda s: "meta" in s.options and s.sharding == "replicate",
        "without sharding there is nothing that the meta device would save",
        "megatron_fsdp/fully_shard.py, fully_shard_model",
        LibraryError("ValueError", "Meta device initialization (init_model_with_meta_device=True)", "build"),
    ),
    Limit("expert-parallel", lambda s: s.expert_parallel > 1, "expert parallelism is driven through megatron-core"),
    Limit(
        "gpt",
        lambda s: s.model == "gpt" or any(p.spec.ep_dim is not None for p in model_spec(s.model).params),
        "models of Megatron-Core's layers are driven through megatron-core",
    ),
    Limit(
        "logical-faults",
        lambda s: any(not fault.startswith("boundary.") for fault in s.faults),
        "logical faults mutate the reference; this system runs unmodified",
    ),
)


def unsupported(scenario: Scenario) -> str | None:
    """Why Megatron-FSDP cannot run a scenario; None where it can."""
    return first_reason(LIMITS, scenario)


def not_exercised(scenario: Scenario) -> tuple[str, ...]:
    """What streams would have to be real for."""
    return () if {"no_overlap_gather", "no_overlap_reduce"} <= {*scenario.options} else ("overlap",)


INFO = register(
    SystemInfo(
        name="megatron-fsdp",
        doc="Megatron-FSDP (ZeRO-1, 2, 3 and hybrid), unmodified, on gloo and an emulated CUDA device",
        world="fork",
        entry="harness.systems.megatron_fsdp_rank:MegatronFsdpRank",
        unsupported=unsupported,
        limits=LIMITS,
        distributions=("megatron-fsdp", "torch"),
        emulated=(
            "CUDA device, with tensors on the CPU",
            "NCCL's PREMUL_SUM, AVG and coalescing",
            "transformer_engine_torch, the compiled extension",
        ),
        warm_up="harness.systems.megatron_fsdp_rank:warm_up",
        package="megatron-fsdp",
        options=OPTIONS,
        not_exercised=not_exercised,
        owner_groups=True,
    )
)
