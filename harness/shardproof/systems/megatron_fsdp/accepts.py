"""Which scenarios Megatron-FSDP runs.

Every limit with an `error` is a deliberate refusal of the library, which the conformance kit has the real library
raise; the others have no meaning for this system. What else raises is a crash, not a limit.
"""

from __future__ import annotations

from functools import lru_cache

from shardproof.mechanisms import fused_adam
from shardproof.mechanisms.fused_adam import DECOUPLED, PRECISION_AWARE
from shardproof.mechanisms.row_buffers import local_shapes, rows
from shardproof.models import model_spec
from shardproof.program import meshes
from shardproof.protocol.accepts import (
    NUMBERS,
    Accepts,
    Anything,
    Faults,
    Formats,
    LibraryError,
    Limit,
    Loads,
    Only,
    Operations,
    Parts,
    Words,
)
from shardproof.scenario import DTypePolicy, Optimizer, Scenario
from shardproof.systems.megatron_fsdp.contract import CONTRACT
from shardproof.versions import before

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


def _reduced_twice(s: Scenario) -> bool:
    in_place = s.sharding in IN_PLACE or any(mesh.dp_replicate > 1 for mesh in meshes(s))
    return s.grad_sync == "every" and s.microbatches > 1 and in_place


LIMITS: tuple[Limit, ...] = (
    Limit(
        "rows",
        lambda s: not model_spec(s.model).has_rows,
        "buffers are cut at rows: where a parameter without rows lies in them has not been worked out here",
    ),
    Limit(
        "sync-in-place",
        _reduced_twice,
        "reducing after every microbatch is for gradients that are not reduced where they accumulate: the library's "
        "documentation asks for a zero_grad in between under zero1, replicate and hybrid sharding",
        "megatron_fsdp README, sync_model_each_microbatch",
    ),
    Limit(
        "fused-sgd",
        lambda s: CONTRACT.fused(s) and s.optimizer.kind == "sgd",
        "FusedSGD reads no decoupled gradient: upstream drives FusedAdam",
    ),
    Limit(
        "decoupled-fused",
        lambda s: CONTRACT.reads_decoupled(s) and not CONTRACT.fused(s),
        "only FusedAdam reads a decoupled gradient: optimizer adamw/impl=multi_tensor",
    ),
    Limit(
        "decoupled-torch",
        lambda s: CONTRACT.reads_decoupled(s) and bool(s.optimizer.clip or s.optimizer.loss_scale),
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
        LibraryError(
            "ValueError",
            "Sharding with Hybrid (Fully) Sharded Data Parallel (HSDP) requires",
            "build",
            {"mesh": "2x2x1", "sharding": "zero1", "options": "neutral_start+outer_optim"},
        ),
    ),
    Limit(
        "meta-replicate",
        lambda s: "meta" in s.options and s.sharding == "replicate",
        "without sharding there is nothing that the meta device would save",
        "megatron_fsdp/fully_shard.py, fully_shard_model",
        LibraryError(
            "ValueError",
            "Meta device initialization (init_model_with_meta_device=True)",
            "build",
            {"sharding": "replicate", "options": "meta+neutral_start"},
        ),
    ),
    Limit(
        "unoverlapped-grads",
        lambda s: "no_overlap_reduce" in s.options and s.sharding == "zero2" and before(s.version, "0.3"),
        "before 0.3.0 gradients sharded by zero2 have to be reduced while the backward pass runs",
        "megatron_fsdp/megatron_fsdp.py (0.2.3), MegatronFSDP.__init__",
        LibraryError(
            "AssertionError",
            "",
            "build",
            {"version": "0.2.3", "sharding": "zero2", "options": "neutral_start+no_overlap_reduce"},
        ),
    ),
    Limit(
        "gpt",
        lambda s: s.model == "gpt" or any(p.spec.ep_dim is not None for p in model_spec(s.model).params),
        "models of Megatron-Core's layers are driven through megatron-core",
    ),
)


ACCEPTS = Accepts(
    "megatron-fsdp",
    model=Anything(),
    mesh=Anything(),
    load=Loads("same", "grow", "shrink", "indivisible", "tp_change"),
    load_version=Anything(),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", "mixed", "mixed_fp16"),
        param=Only(None, because="parameters compute in the dtype they are stored in"),
        output=Only(None, because="parameters compute in the dtype they are stored in"),
        reduce=Only(None, "fp32", "bf16", "fp16"),
        master=Only(None, "fp32", "bf16", "fp16"),
        grad=Only(None, "fp32", "bf16", "fp16"),
        exp_avg=Only(None, "fp32", "bf16", "fp16", "fp8e4m3"),
        exp_avg_sq=Only(None, "fp32", "bf16", "fp16", "fp8e4m3"),
    ),
    sharding=Only("fully_shard", "zero2", "zero1", "replicate"),
    reshard_after_forward=Only("true", because="units are released after their forward"),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw"),
        impl=Only("forloop", "foreach", "fused", "multi_tensor"),
        schedule=Only("none", "halve"),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    grad_sync=Only("last", "every"),
    checkpoint=Formats({"dcp": ()}),
    program=Operations(
        ("build", "step", "overflow", "save", "load", "load_model_only", "reload_params"),
        because="trainable parameters are bucketed at the build, so that none can be unfrozen",
    ),
    options=Words(OPTIONS),
    faults=Faults(),
    seed=Anything(),
    limits=LIMITS,
    constraints=fused_adam.constraints(CONTRACT),
)


def not_exercised(scenario: Scenario) -> tuple[str, ...]:
    """What a scenario asks for that shows only where streams are real: overlap."""
    return () if {"no_overlap_gather", "no_overlap_reduce"} <= {*scenario.options} else ("overlap",)


def some_rank_owns_nothing(scenario: Scenario) -> bool:
    """Whether sharding leaves some rank of the first mesh no row of some trainable parameter. For example, a parameter
    of 2 rows on 4 ranks."""
    if scenario.fact("sharding", lambda sharding: sharding == "replicate"):
        return False
    parts, tp = scenario.fact("mesh", lambda mesh: (mesh.dp_shard, mesh.tp))
    if parts == 1:
        return False
    storage = scenario.fact("dtype", lambda dtype: dtype.storage)
    return _leaves_a_rank_nothing(scenario.model, storage, parts, tp)


@lru_cache(maxsize=4096)
def _leaves_a_rank_nothing(model: str, storage: str, parts: int, tp: int) -> bool:
    trainable = {p.fqn for p in model_spec(model).unique_params if p.spec.trainable != "no"}
    for tp_index in range(tp):
        if any(0 in shape for shape in local_shapes(model, tp, tp_index).values()):
            return False  # tensor parallelism alone leaves a rank nothing, which `ACCEPTS` refuses
        owned = rows(model, DTypePolicy(storage), parts, tp, tp_index)
        if any(not count for fqn, cuts in owned.items() if fqn in trainable for _, count in cuts):
            return True
    return False


PREDICATES = {"some_rank_owns_nothing": some_rank_owns_nothing}
"""What this system's files ask of a scenario by name."""
