"""Which scenarios DeepSpeed runs."""

from __future__ import annotations

from harness.models import model_spec
from harness.scenario import DTypePolicy, Optimizer, Scenario
from harness.systems.accepts import (
    NUMBERS,
    Accepts,
    Anything,
    Faults,
    Formats,
    Limit,
    Loads,
    Only,
    Operations,
    Parts,
    Words,
)
from harness.systems.deepspeed.contract import NO_HYSTERESIS
from harness.systems.deepspeed.flat import ALIGNED, ROUND_ROBIN

SMALL_BUCKETS, NO_REDUCE_SCATTER, OVERLAP = "small_buckets", "no_reduce_scatter", "overlap_comm"

OPTIONS = {
    NO_HYSTERESIS: "hysteresis of 1: the first overflow halves the loss scale",
    NO_REDUCE_SCATTER: "reduce_scatter=False: gradients are reduced by one all-reduce of the bucket",
    OVERLAP: "overlap_comm=True: two buckets take turns",
    ALIGNED: "parameter_alignment=True: each parameter begins at a multiple of 16 bytes in its flat buffer",
    ROUND_ROBIN: "round_robin_gradients=True: parameters are dealt out to the ranks in turn",
    SMALL_BUCKETS: "reduce and allgather buckets of 16 elements, so that there are several, and larger parameters",
}

STAGES = {"zero1": 1, "zero2": 2, "fully_shard": 3}
"""Sharding → the stage of ZeRO."""

LIMITS = (
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
        "scale-fp16",
        lambda s: s.dtype.storage != "fp16" and s.optimizer.loss_scale > 0,
        "only fp16 has a loss scale",
    ),
)

ACCEPTS = Accepts(
    "deepspeed",
    model=Anything(),
    mesh=Anything(),
    load=Loads("same"),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", because="the engine casts the whole model"),
        param=Only(None, because="parameters compute in the dtype they are stored in"),
        reduce=Only(None, "fp32"),
        master=Only(None, because="masters are always in fp32"),
    ),
    sharding=Only("zero1", "zero2"),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw"),
        impl=Only("forloop", "foreach", "fused", because="the optimizer is torch.optim's"),
        schedule=Only("none", "halve"),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    checkpoint=Formats({"zero": ()}),
    program=Operations(
        ("build", "step", "overflow", "save", "load", "load_model_only", "reload_params"),
        because="the trainable parameters are laid out at the build, so that none can be unfrozen",
    ),
    options=Words(OPTIONS),
    faults=Faults(),
    seed=Anything(),
    limits=LIMITS,
)


def not_exercised(scenario: Scenario) -> tuple[str, ...]:
    """What streams would have to be real for."""
    return ("overlap",) if OVERLAP in scenario.options else ()
