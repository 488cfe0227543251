"""Which scenarios ZeroRedundancyOptimizer under DistributedDataParallel runs."""

from __future__ import annotations

from harness.scenario import DTypePolicy, Optimizer
from harness.systems.accepts import (
    EVERY_STEP,
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
)

ACCEPTS = Accepts(
    "torch-zero",
    model=Anything(),
    mesh=Anything(),
    load=Loads("same", "grow", "shrink", "indivisible"),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", "mixed", "mixed_fp16"),
        param=Only(None, because="DistributedDataParallel computes in the storage dtype"),
        reduce=Only(None, because="DistributedDataParallel reduces in the storage dtype"),
        master=Only(None, because="torch.optim steps the parameters themselves"),
    ),
    sharding=Only("zero1", because="ZeroRedundancyOptimizer shards the optimizer's state"),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw"),
        impl=Only("foreach", "forloop"),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    checkpoint=Formats({"full": ()}),
    program=Operations(EVERY_STEP),
    faults=Faults(),
    seed=Anything(),
    limits=(
        Limit(
            "one-group",
            lambda s: s.mesh.tp > 1 or s.mesh.dp_replicate > 1,
            "there is one data-parallel group: mesh is 1xNx1",
        ),
    ),
)
