"""Which scenarios the reference runs: all whose arithmetic the twin has too, since only the twin can check it."""

from __future__ import annotations

from shardproof.models import model_spec
from shardproof.program import does
from shardproof.protocol.accepts import (
    EVERY_STEP,
    MODULES_KEEP,
    NUMBERS,
    OPEN_LOOP,
    Accepts,
    Anything,
    Constraint,
    Faults,
    Formats,
    Limit,
    Loads,
    Only,
    Operations,
    Parts,
)
from shardproof.scenario import TORCH_SCHEDULES, DTypePolicy, Offload, Optimizer, Scenario


def _fp16_gradients(scenario: Scenario) -> bool:
    """Whether the optimizer sees fp16 gradients, which torch's GradScaler, and so the twin, refuses to unscale."""
    policy = scenario.dtype
    return policy.storage == "fp16" and (scenario.sharding == "fully_shard" or policy.master in (None, "fp16"))


def _has_idle(scenario: Scenario) -> bool:
    """Whether the model has a parameter without a gradient in some steps. If a load dropped the optimizer state of such
    a parameter, its step counter would lag behind the rest."""
    return any(p.spec.idle for p in model_spec(scenario.model).params)


LIMITS = (
    Limit(
        "scaler-fp16-gradients",
        lambda s: s.optimizer.loss_scale > 0 and _fp16_gradients(s),
        "torch's GradScaler refuses to unscale fp16 gradients",
    ),
    Limit(
        "fused-sgd-unfreeze",
        lambda s: (
            (s.optimizer.kind, s.optimizer.impl) == ("sgd", "fused")
            and s.optimizer.momentum != 0
            and (does(s, "unfreeze", "add_group") or (does(s, "load_optimizer_only") and _has_idle(s)))
        ),
        "torch's fused SGD, and so the twin, raises TypeError when some parameters of a group have no momentum yet",
    ),
)

CONSTRAINTS = (
    Constraint(
        "experts-mesh",
        "expert parallelism must divide the data-parallel ranks",
        lambda s: s.mesh.dp % s.expert_parallel != 0,
    ),
    Constraint(
        "bucket-sharding",
        "bucket_space checkpoints hold flat bucket buffers: per-parameter sharding has none",
        lambda s: s.checkpoint == "bucket_space" and s.sharding != "zero1",
    ),
)

ACCEPTS = Accepts(
    "reference",
    keeps=MODULES_KEEP,
    model=Anything(),
    mesh=Anything(),
    expert_parallel=Only(1, 2, because="two groups of ranks that share experts out show what more would"),
    load=Loads("same", "grow", "shrink", "indivisible", "tp_change"),
    load_dtype=Anything(),
    load_model=Anything(),
    load_optimizer=Anything(),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", "mixed", "mixed_fp16"),
        param=Only(None, "fp32", "bf16", "fp16"),
        reduce=Only(None, "fp32", "bf16", "fp16"),
        output=Only(None, "fp32", "bf16", "fp16"),
        master=Only(None, "fp32", "bf16", "fp16"),
    ),
    sharding=Only("fully_shard", "zero1", "replicate", because="zero2 reduces gradients to the same values as zero1"),
    reshard_after_forward=Anything(),
    offload=Parts(Offload, fraction=Anything()),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw", "muon"),
        impl=Only(
            "forloop", "foreach", "fused", because="FusedAdam is stepped under the rules of the systems that have it"
        ),
        schedule=Only(*TORCH_SCHEDULES, because="the others are schedules of a library's own"),
        tensor_lr=Only(False, True),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    grad_sync=Only("last", "every", "uneven"),
    checkpoint=Formats({"gathered": (), "bucket_space": (), "model_space": (), "sharded": ()}),
    program=Operations((*EVERY_STEP, *OPEN_LOOP)),
    faults=Faults(logical=True),
    seed=Anything(),
    limits=LIMITS,
    constraints=CONSTRAINTS,
)
