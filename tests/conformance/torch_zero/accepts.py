"""Which scenarios ZeroRedundancyOptimizer under DistributedDataParallel runs."""

from __future__ import annotations

from shardproof.models import model_spec, storage_dtype
from shardproof.program import operations
from shardproof.protocol.accepts import (
    EVERY_STEP,
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
)
from shardproof.scenario import DTypePolicy, Optimizer, Scenario


def _mixes_dtypes(scenario: Scenario) -> bool:
    params = model_spec(scenario.model).unique_params
    return (
        scenario.dtype.storage.startswith("mixed") and len({storage_dtype(scenario.dtype, p.spec) for p in params}) > 1
    )


def _leaves_out(scenario: Scenario) -> bool:
    """Whether some trainable parameter takes part in no forward."""
    return any(p.spec.trainable == "yes" and not p.spec.used for p in model_spec(scenario.model).unique_params)


def unfreezes(scenario: Scenario) -> bool:
    """Whether parameters become trainable after the model was wrapped, on more than one rank."""
    return scenario.mesh.world > 1 and "unfreeze" in operations(scenario.program)


PREDICATES = {"unfreezes": unfreezes}

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
    checkpoint=Formats({"consolidated": ()}),
    program=Operations(EVERY_STEP),
    faults=Faults(),
    seed=Anything(),
    limits=(
        Limit(
            "one-group",
            lambda s: s.mesh.tp > 1 or s.mesh.dp_replicate > 1,
            "there is one data-parallel group: mesh is 1xNx1",
        ),
        Limit(
            "one-dtype",
            _mixes_dtypes,
            "ZeroRedundancyOptimizer takes parameters of one dtype",
            "torch/distributed/optim/zero_redundancy_optimizer.py, _verify_same_dense_param_type",
            LibraryError(
                "ValueError", "only supports using the same dense type for all parameters", "build",
                {"model": "twins", "dtype": "mixed", "program": "build"},
            ),
        ),
        Limit(
            "all-take-part",
            _leaves_out,
            "DistributedDataParallel needs every trainable parameter in every forward (find_unused_parameters=False)",
            "torch/nn/parallel/distributed.py, _pre_forward",
            LibraryError(
                "RuntimeError", "Expected to have finished reduction in the prior iteration", "step",
                {"model": "unused", "program": "build step step"},
            ),
        ),
    ),
)  # fmt: skip
