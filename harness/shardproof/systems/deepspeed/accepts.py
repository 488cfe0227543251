"""Which scenarios DeepSpeed runs."""

from __future__ import annotations

from shardproof.loading import switches
from shardproof.models import model_spec
from shardproof.program import UPDATES, WRITES, does, meshes, operations
from shardproof.protocol.accepts import (
    NUMBERS,
    Accepts,
    Anything,
    Constraint,
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
from shardproof.protocol.features import Feature, lacks
from shardproof.scenario import DTypePolicy, Offload, Optimizer, Scenario
from shardproof.systems.deepspeed.contract import (
    NO_HYSTERESIS,
    NO_SCHEDULE,
    OWN_SCHEDULES,
    takes_bf16_optimizer,
)
from shardproof.systems.deepspeed.flat import ALIGNED, ROUND_ROBIN, SUB_GROUPS

SMALL_BUCKETS, NO_REDUCE_SCATTER, OVERLAP = "small_buckets", "no_reduce_scatter", "overlap_comm"

PERSISTENT, EAGER = "persistent", "eager_release"
MANY, BOUNDARY, NO_SYNC = "many_backwards", "own_boundary", "no_sync"
UNMANAGED, COALESCED = "unmanaged", "coalesced"
NO_OPTIMIZER, WRITER = "no_optimizer_states", "python_writer"
OFFLOADS = "offload_states"
ACCUMULATES = (MANY, BOUNDARY, NO_SYNC, UNMANAGED, COALESCED)
"""Switches with which the caller says where accumulation ends, and calls `engine.step` once."""
IN_BUFFERS = (NO_REDUCE_SCATTER, ALIGNED, ROUND_ROBIN)
"""Switches of stages 1 and 2, which stage 3 does not read."""
IN_PARTS = (PERSISTENT, EAGER, SUB_GROUPS)
"""Switches of stage 3, which the others do not read."""

OPTIONS = {
    MANY: "gradient_accumulation_steps of 1, and several engine.backward before one engine.step",
    BOUNDARY: "engine.set_gradient_accumulation_boundary before each backward pass, and one engine.step",
    NO_SYNC: "gradient_accumulation_steps of 1, and all backward passes but the last in engine.no_sync()",
    UNMANAGED: "managed_gradient_accumulation=False: several engine.backward, and engine.step ends the accumulation",
    COALESCED: "all backward passes of a step in engine.coalesce_grad_reduction(), which reduces once at its end",
    EAGER: "stage 3 with max_live_parameters=0 and max_reuse_distance=0: parameters are released after every module",
    NO_SCHEDULE: "load_checkpoint with load_lr_scheduler_states=False: the schedule begins anew at the saved rates",
    NO_OPTIMIZER: "the model alone is loaded by load_checkpoint with load_optimizer_states=False and "
    "load_lr_scheduler_states=False, in place of load_module_only=True",
    WRITER: "checkpoint.writer of type python: FastCheckpointEngine writes the files, one rank for each of them",
    OFFLOADS: "engine.offload_states and reload_states after every step, under stage 3 of what is in low precision",
    NO_HYSTERESIS: "hysteresis of 1: the first overflow halves the loss scale",
    NO_REDUCE_SCATTER: "reduce_scatter=False: gradients are reduced by one all-reduce of the bucket",
    OVERLAP: "overlap_comm=True: two buckets take turns",
    PERSISTENT: "stage 3 with a param_persistence_threshold of 20: smaller parameters stay whole on every rank",
    ALIGNED: "parameter_alignment=True: each parameter begins at a multiple of 16 bytes in its flat buffer",
    ROUND_ROBIN: "round_robin_gradients=True: parameters are dealt out to the ranks in turn",
    SMALL_BUCKETS: "reduce and allgather buckets of 16 elements, so that there are several, and larger parameters",
    SUB_GROUPS: "stage 3 with a sub_group_size of 24 elements: a param group is stepped in several parts",
}

STAGES = {"zero1": 1, "zero2": 2, "fully_shard": 3}
"""Sharding → the stage of ZeRO."""

_ALIGNS = Feature("parameter_alignment", "0.19.7", "runtime/zero/config.py: DeepSpeedZeroConfig.parameter_alignment")

_COALESCES = Feature("coalesce_grad_reduction", "0.19.1", "runtime/engine.py: DeepSpeedEngine.coalesce_grad_reduction")
_WRITES = Feature(
    "python_writer", "0.17", "runtime/checkpoint_engine/fast_checkpoint_engine.py: FastCheckpointEngine.save"
)
_OFFLOADS = Feature("offload_states", "0.19", "runtime/engine.py: DeepSpeedEngine._refine_include_states")
_UNMANAGED = Feature(
    "managed_gradient_accumulation", "0.19.4", "runtime/engine.py: DeepSpeedEngine.managed_gradient_accumulation"
)


def caller_accumulates(s: Scenario) -> bool:
    """Whether the caller, and not the engine, says where accumulation ends."""
    return any(word in s.options for word in ACCUMULATES)


LIMITS = (
    Limit(
        "accumulates-once",
        lambda s: sum(word in s.options for word in ACCUMULATES) > 1,
        f"one of {', '.join(ACCUMULATES)} says where accumulation ends",
    ),
    Limit(
        "accumulates-nothing",
        lambda s: caller_accumulates(s) and s.microbatches == 1,
        f"{', '.join(ACCUMULATES)} need a second microbatch",
    ),
    Limit(
        "no-schedule",
        lambda s: NO_SCHEDULE in s.options and (s.optimizer.schedule == "none" or not does(s, "load")),
        f"{NO_SCHEDULE} needs a schedule and a load",
    ),
    Limit(
        "no-optimizer-states",
        lambda s: NO_OPTIMIZER in s.options and not does(s, "load_model_only"),
        f"{NO_OPTIMIZER} is about loads of the model alone",
    ),
    Limit(
        "no-sync-stage",
        lambda s: NO_SYNC in s.options and s.sharding != "zero1",
        "no_sync is for stage 1: stages 2 and 3 partition gradients as they reduce them",
        "deepspeed/runtime/engine.py, no_sync",
        LibraryError(
            "AssertionError",
            "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage",
            "step",
            {"sharding": "zero2", "options": "no_sync", "microbatches": "2"},
        ),
    ),
    Limit(
        "coalesce-bf16-optimizer",
        lambda s: COALESCED in s.options and takes_bf16_optimizer(s),
        "coalesce_grad_reduction does not know the optimizer of stage 1 in bf16 with gradients in fp32",
        "deepspeed/runtime/engine.py, coalesce_grad_reduction",
        LibraryError(
            "NotImplementedError",
            "coalesce_grad_reduction does not yet support optimizer wrapper BF16_Optimizer",
            "step",
            {"sharding": "zero1", "options": "coalesced", "microbatches": "2", "dtype": "bf16/reduce=fp32"},
        ),
    ),
    Limit(
        "coalesce-release",
        lambda s: COALESCED in s.options and lacks(s, _COALESCES),
        "coalesce_grad_reduction is there from 0.19.1 on",
    ),
    Limit(
        "unmanaged-release",
        lambda s: UNMANAGED in s.options and lacks(s, _UNMANAGED),
        "managed_gradient_accumulation is an option from 0.19.4 on",
    ),
    Limit(
        "writer-release",
        lambda s: WRITER in s.options and lacks(s, _WRITES),
        "checkpoint.writer is read from 0.17 on",
    ),
    Limit(
        "offloads-release",
        lambda s: OFFLOADS in s.options and lacks(s, _OFFLOADS),
        "before 0.19 offload_states is for DeepSpeed's FusedAdam (stage 3) or for pinned memory (stages 1 and 2)",
        "deepspeed/runtime/zero/stage3.py, offload_states",
        LibraryError(
            "AssertionError",
            "Offloading is supported only for DeepSpeed FusedAdam",
            "step",
            {"sharding": "fully_shard", "options": OFFLOADS, "version": "0.18.9"},
        ),
    ),
    Limit(
        "offloads-bf16-optimizer",
        lambda s: OFFLOADS in s.options and takes_bf16_optimizer(s),
        "the optimizer of stage 1 in bf16 with gradients in fp32 has no offload_states",
        "deepspeed/runtime/engine.py, offload_states",
        LibraryError(
            "AttributeError",
            "'BF16_Optimizer' object has no attribute 'offload_states'",
            "step",
            {"sharding": "zero1", "options": OFFLOADS, "dtype": "bf16/reduce=fp32"},
        ),
    ),
    Limit(
        "other-world",
        lambda s: s.checkpoint == "zero" and does(s, "load") and len(set(meshes(s))) > 1,
        "optimizer state is loaded by as many ranks as have saved it; a universal checkpoint goes to any number",
        "deepspeed/runtime/engine.py, _load_zero_checkpoint",
        LibraryError(
            "ZeRORuntimeException",
            "Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently",
            "load",
            {"load": "grow", "program": "resume"},
        ),
    ),
    Limit(
        "one-group",
        lambda s: s.mesh.tp > 1 or s.mesh.dp_replicate > 1,
        "there is one data-parallel group: mesh is 1xNx1",
    ),
    Limit(
        "experts",
        lambda s: any(p.spec.ep_dim is not None for p in model_spec(s.model).params),
        "experts are shared out by DeepSpeed's own layers of them, which are not driven here",
    ),
    Limit(
        "other-stage",
        lambda s: any(word in s.options for word in (IN_BUFFERS if s.sharding == "fully_shard" else IN_PARTS)),
        f"{', '.join(IN_BUFFERS)} are for stages 1 and 2; {', '.join(IN_PARTS)} for stage 3",
    ),
    Limit(
        "alignment-release",
        lambda s: ALIGNED in s.options and lacks(s, _ALIGNS),
        "parameter_alignment is an option from 0.19.7 on",
        "deepspeed/runtime/zero/config.py, DeepSpeedZeroConfig",
        LibraryError(
            "ValidationError",
            "Extra inputs are not permitted",
            "build",
            {"version": "0.19.0", "options": "parameter_alignment"},
        ),
    ),
    Limit(
        "other-alignment",
        lambda s: switches(s, ALIGNED) and s.checkpoint == "zero" and does(s, "load"),
        "the flat buffers of stages 1 and 2 are laid out otherwise with parameter_alignment",
        "deepspeed/runtime/zero/stage_1_and_2.py, _load_legacy_checkpoint",
        LibraryError(
            "RuntimeError",
            "The ZeRO checkpoint parameter-alignment layout does not match",
            "load",
            {"program": "restart", "load_options": ALIGNED, "mesh": "1x2x1"},
        ),
    ),
    Limit(
        "other-sub-groups",
        lambda s: switches(s, SUB_GROUPS) and s.checkpoint == "zero" and does(s, "load"),
        "under stage 3 the optimizer has a tensor for each sub-group",
        "torch/optim/optimizer.py, load_state_dict",
        LibraryError(
            "ValueError",
            "loaded state dict contains a parameter group that doesn't match",
            "load",
            {"program": "restart", "load_options": SUB_GROUPS, "sharding": "fully_shard", "mesh": "1x2x1"},
        ),
    ),
    Limit(
        "bf16-optimizer",
        lambda s: takes_bf16_optimizer(s) and any(word in s.options for word in (*IN_BUFFERS, OVERLAP)),
        f"stage 1 in bf16 with gradients in fp32 does not read {', '.join((*IN_BUFFERS, OVERLAP))}",
        "deepspeed/runtime/engine.py, _configure_bf16_optimizer",
    ),
    Limit(
        "scale-fp16",
        lambda s: s.dtype.storage != "fp16" and s.optimizer.loss_scale > 0,
        "only fp16 has a loss scale",
    ),
)

CONSTRAINTS = (
    Constraint(
        "rounded-seventh",
        "gradients are averaged by a multiplication with 1/7, rounded to fp32: exact means are not met",
        lambda s: any(mesh.dp % 7 == 0 for mesh in meshes(s)) and _averages_in_fp32(s),
    ),
    Constraint(
        "rewind-at-rest",
        "the first two steps of a warm-up from 0 change no parameter: going back over them would find what it restores",
        lambda s: s.fact("optimizer", _rises_from_zero) and s.fact("program", _goes_back_over_two_steps),
    ),
)


def _rises_from_zero(ask: Optimizer) -> bool:
    return ask.schedule in ("linear", "warmup")


def _goes_back_over_two_steps(program: str) -> bool:
    """Whether a program loads what the same build has saved, at most two steps after that build."""
    steps, saved = 0, False
    for word in operations(program):
        if word in ("build", "reshard", "restart"):
            steps, saved = 0, False
        elif word in UPDATES:
            steps += 1
        elif word in WRITES:
            saved = True
        elif word.startswith("load") and saved and steps <= 2:
            return True
    return False


def _averages_in_fp32(s: Scenario) -> bool:
    """Whether sums over ranks are multiplied, not divided, and not rounded to half precision afterwards."""
    wide = "fp32" in (s.dtype.storage, s.dtype.reduce)
    return takes_bf16_optimizer(s) or (NO_REDUCE_SCATTER in s.options and wide)


ACCEPTS = Accepts(
    "deepspeed",
    model=Anything(),
    mesh=Anything(),
    load=Loads("same", "grow", "shrink", "indivisible"),
    load_version=Anything(),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", because="the engine casts the whole model"),
        param=Only(None, because="parameters compute in the dtype they are stored in"),
        reduce=Only(None, "fp32"),
        master=Only(None, because="masters are always in fp32"),
    ),
    sharding=Only("zero1", "zero2", "fully_shard", because="they are ZeRO's stages 1, 2 and 3"),
    offload=Parts(Offload, fraction=Only(0.0, 1.0, because="offload_optimizer takes all of it")),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw"),
        impl=Only("forloop", "foreach", "fused", because="the optimizer is torch.optim's"),
        schedule=Only("none", "halve", *OWN_SCHEDULES),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    checkpoint=Formats({"zero": (), "universal": ()}),
    program=Operations(
        ("build", "step", "overflow", "save", "load", "load_model_only", "reload_params"),
        because="the trainable parameters are laid out at the build, so that none can be unfrozen",
    ),
    options=Words(OPTIONS),
    load_options=Words({word: OPTIONS[word] for word in (ALIGNED, ROUND_ROBIN, SUB_GROUPS)}),
    faults=Faults(),
    seed=Anything(),
    limits=LIMITS,
    features=(_ALIGNS, _COALESCES, _OFFLOADS, _UNMANAGED, _WRITES),
    constraints=CONSTRAINTS,
)


def not_exercised(scenario: Scenario) -> tuple[str, ...]:
    """What streams would have to be real for."""
    return ("overlap",) if OVERLAP in scenario.options else ()
