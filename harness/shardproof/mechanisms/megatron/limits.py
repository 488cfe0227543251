"""What Megatron-Core refuses, or what has no meaning for it, whichever system drives it.

Every limit with an `error` is a deliberate refusal of the library, which the conformance kit has the real library
raise. The others have no meaning there, or cannot be run on a machine without a GPU. What raises by accident is a
crash, no limit.
"""

from __future__ import annotations

from collections.abc import Callable

from shardproof.mechanisms.megatron.contract import MegatronContract
from shardproof.mechanisms.param_scheduler import OWN_SCHEDULES
from shardproof.models import ModelSpec, model_spec, storage_dtype
from shardproof.oracle.contract import half_dtype
from shardproof.program import load_mesh, meshes, operations
from shardproof.protocol.accepts import (
    NUMBERS,
    Allowed,
    Anything,
    Constraint,
    LibraryError,
    Limit,
    Loads,
    Only,
    Operations,
    Parts,
)
from shardproof.scenario import DTypePolicy, Offload, Optimizer, Scenario
from shardproof.versions import before, is_version

MAX_FP16_LOSS_SCALE = 2048.0


def has(*words: str) -> Callable[[Scenario], bool]:
    """A predicate: whether a scenario has one of these options."""

    def among(options: tuple[str, ...]) -> bool:
        return not set(words).isdisjoint(options)

    return lambda s: s.fact("options", among)


def _halves(scenario: Scenario) -> bool:
    return scenario.dtype.storage != "fp32"


def _fp16(scenario: Scenario) -> bool:
    return scenario.dtype.storage in ("fp16", "mixed_fp16")


def _reduces_otherwise(scenario: Scenario) -> bool:
    """Whether a reduction dtype is asked for that DDP cannot give: it reduces everything in the storage dtype, or
    everything in fp32."""
    asked = scenario.dtype.reduce
    return asked is not None and asked != "fp32" and scenario.dtype.storage != asked


def _indivisible_tp(scenario: Scenario) -> bool:
    sizes = {mesh.tp for mesh in meshes(scenario)} - {1}
    return bool(sizes) and any(dim % tp for dim in scenario.fact("model", _tp_dims) for tp in sizes)


def _tp_dims(model: str) -> frozenset[int]:
    """The sizes of the dims that tensor parallelism shards."""
    params = model_spec(model).unique_params
    return frozenset(p.spec.shape[p.spec.tp_dim] for p in params if p.spec.tp_dim is not None)


def _indivisible_ep(scenario: Scenario) -> bool:
    ep = scenario.expert_parallel
    if ep == 1:
        return False
    if any(mesh.dp % ep for mesh in meshes(scenario)):
        return True
    return any(count % ep for count in scenario.fact("model", _experts))


def _experts(model: str) -> frozenset[int]:
    """The numbers of experts that a model's weights hold."""
    return frozenset(p.spec.shape[p.spec.ep_dim] for p in model_spec(model).params if p.spec.ep_dim is not None)


def _indivisible_instances(scenario: Scenario) -> bool:
    ep = scenario.expert_parallel
    return ep > 1 and any(mesh.dp % ep == 0 and mesh.dp // ep % mesh.dp_replicate for mesh in meshes(scenario))


def _rounds_average(scenario: Scenario) -> bool:
    """Whether seven ranks average gradients in fp32. DDP multiplies by 1/7, which fp32 rounds; a gradient in half
    precision is rounded back to the exact value."""
    return "fp32" in (scenario.dtype.reduce, scenario.dtype.storage) and any(m.dp == 7 for m in meshes(scenario))


def _rounds_average_of_islands(scenario: Scenario) -> bool:
    """The same of a parameter that stays in fp32 beside half-precision ones. Whether the program ever goes to the load
    mesh is not asked, since a table of dtype, model, meshes and programs would be too large; where it does not, the
    relation has no effect."""
    if scenario.dtype.reduce == "fp32" or not scenario.dtype.storage.startswith("mixed"):
        return False
    after = load_mesh(scenario)
    if scenario.mesh.dp != 7 and (after is None or after.dp != 7):
        return False
    return any(storage_dtype(scenario.dtype, p.spec) == "fp32" for p in model_spec(scenario.model).unique_params)


def group_decays(scenario: Scenario, model: ModelSpec) -> set[float]:
    """The weight decays that the model's groups ask for, besides the optimizer's own."""
    if scenario.optimizer.groups == "one":
        return set()
    return {g.weight_decay for g in model.groups if g.weight_decay is not None}


def _decay_of_nothing(scenario: Scenario) -> bool:
    return not scenario.optimizer.weight_decay and bool(group_decays(scenario, model_spec(scenario.model)) - {0.0})


def _precision_aware_dtypes(scenario: Scenario) -> bool:
    policy = scenario.dtype
    return any(d not in (None, "fp32") for d in (policy.grad, policy.master, policy.exp_avg, policy.exp_avg_sq))


def _unused_in_bucket(scenario: Scenario) -> bool:
    """Whether a program steps more than once with a model that has a parameter which does not get a gradient in every
    step, beside others in its bucket."""
    return scenario.fact("program", _steps_again) and scenario.fact("model", _has_unused)


def _steps_again(program: str) -> bool:
    return operations(program).count("step") + operations(program).count("overflow") > 1


def _has_unused(model: str) -> bool:
    params = model_spec(model).unique_params
    return any(p.spec.trainable == "yes" and (not p.spec.used or p.spec.idle == "odd") for p in params)


REFUSED: tuple[Limit, ...] = (
    Limit(
        "precision-aware-without-te",
        lambda s: has("precision_aware")(s) and s.optimizer.impl == "forloop",
        "the precision-aware optimizer needs TransformerEngine; without it the library compares its version with "
        "None",
        "megatron/core/optimizer/optimizer_config.py, __post_init__",
    ),
    Limit(
        "precision-aware-replicate",
        lambda s: has("precision_aware")(s) and s.sharding == "replicate" and s.optimizer.kind != "sgd",
        "the precision-aware optimizer is a distributed one",
        "megatron/core/optimizer/optimizer_config.py, __post_init__",
        LibraryError(
            "AssertionError", "only supported with distributed optimizer", "build",
            {"options": "precision_aware", "sharding": "replicate", "checkpoint": "plain"},
        ),
    ),
    Limit(
        "precision-aware-sgd",
        lambda s: has("precision_aware")(s) and s.optimizer.kind == "sgd",
        "the precision-aware optimizer is Adam",
        "megatron/core/optimizer/optimizer_config.py, __post_init__",
        LibraryError(
            "AssertionError", "only supported with adam", "build",
            {"options": "precision_aware", "optimizer": "sgd/impl=multi_tensor"},
        ),
    ),
    Limit(
        "dtypes-without-precision-aware",
        lambda s: _precision_aware_dtypes(s) and not has("precision_aware")(s),
        "gradients, masters and moments in half are the precision-aware optimizer's",
        "megatron/core/optimizer/optimizer_config.py, __post_init__",
        LibraryError(
            "AssertionError", "can only be fp32 when not using precision-aware optimizer", "build",
            {"dtype": "bf16/master=fp32/exp_avg=bf16"},
        ),
    ),
    Limit(
        "distributed-sgd",
        lambda s: s.sharding == "zero1" and s.optimizer.kind == "sgd" and not s.offload.fraction,
        "the distributed optimizer takes Adam only",
        "megatron/core/optimizer/distrib_optimizer.py, __init__",
        LibraryError(
            "AssertionError", "Only Adam and HybridDeviceOptimizer currently supported", "build",
            {"optimizer": "sgd/impl=multi_tensor"},
        ),
    ),
    Limit(
        "overlap-unused",
        lambda s: has("overlap_grad_reduce")(s) and _unused_in_bucket(s),
        "with overlap_grad_reduce every parameter of a bucket must get a gradient",
        "megatron/core/distributed/param_and_grad_buffer.py, _ParamAndGradBucketGroup.reset",
        LibraryError("AssertionError", "", "step", {"model": "unused", "options": "overlap_grad_reduce"}),
    ),
    Limit(
        "expert-instances",
        _indivisible_instances,
        "distributed optimizer instances must divide the data-parallel ranks of an expert",
        "megatron/core/parallel_state.py, initialize_model_parallel",
        LibraryError(
            "AssertionError", "Expert data parallel size should be divisible by partial DistOpt", "build",
            {"model": "moe", "expert_parallel": "2", "mesh": "2x1x1"},
        ),
    ),
)  # fmt: skip
"""Combinations that the library refuses by itself, mostly with the error that the conformance kit has it raise."""

DTYPES: tuple[Limit, ...] = (
    Limit(
        "average-of-seven",
        _rounds_average,
        "DDP averages by multiplying with 1/7, which fp32 rounds: sums of the exact grid are no longer exact",
        "megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync",
    ),
    Limit(
        "average-of-seven-islands",
        _rounds_average_of_islands,
        "DDP averages parameters that stay in fp32 by multiplying with 1/7, which fp32 rounds, in half precision too",
        "megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync",
    ),
    Limit("dtype-reduce", _reduces_otherwise, "gradients are reduced in the storage dtype or all of them in fp32"),
    Limit(
        "dtype-master",
        lambda s: _halves(s) and s.dtype.master is None,
        "parameters in half have masters: dtype …/master=fp32",
    ),
    Limit(
        "master-of-fp32",
        lambda s: not _halves(s) and s.dtype.master not in (None, "fp32"),
        "parameters in fp32 are their own masters",
    ),
)  # fmt: skip
"""Dtypes that have no meaning together, or whose arithmetic is not exact."""

SCALING: tuple[Limit, ...] = (
    Limit(
        "scaler",
        lambda s: s.optimizer.loss_scale > 0 and not _fp16(s),
        "the dynamic loss scaler comes with fp16 storage only",
        "megatron/core/optimizer/__init__.py, _get_megatron_optimizer_based_on_param_groups",
    ),
    Limit(
        "fp16-range",
        lambda s: s.optimizer.loss_scale > MAX_FP16_LOSS_SCALE,
        f"the probe's gradients leave fp16's range with a loss scale above {MAX_FP16_LOSS_SCALE:g}",
    ),
)  # fmt: skip
"""Loss scales that the library does not use, or that leave a dtype's range."""

OFFLOADING: tuple[Limit, ...] = (
    Limit(
        "offload-sgd",
        lambda s: s.offload.fraction > 0 and s.optimizer.kind == "sgd",
        "offload is driven with Adam",
    ),
    Limit(
        "offload-options",
        lambda s: has("torch_offload", "overlap_offload")(s) and not s.offload.fraction,
        "torch_offload and overlap_offload are ways to offload",
    ),
)  # fmt: skip
"""Offload that is not driven, and options that mean nothing without it."""

GATHERING: tuple[Limit, ...] = (
    Limit(
        "gather-replicate",
        lambda s: has("overlap_param_gather")(s) and s.sharding == "replicate",
        "only a distributed optimizer gathers parameters",
    ),
    Limit(
        "gather-reduce",
        lambda s: has("overlap_param_gather")(s) and not has("overlap_grad_reduce")(s),
        "the training script allows overlap_param_gather only with overlap_grad_reduce",
        "megatron/training/arguments.py, validate_args",
    ),
    Limit(
        "instances-replicate",
        lambda s: s.sharding == "replicate" and any(mesh.dp_replicate > 1 for mesh in meshes(s)),
        "dp_replicate is the number of distributed optimizer instances: it needs zero1",
    ),
)  # fmt: skip
"""Ways to communicate that need a distributed optimizer, or one another."""

MESHES: tuple[Limit, ...] = (
    Limit("tp-divides", _indivisible_tp, "tensor parallelism must divide the dims it shards"),
    Limit("ep-divides", _indivisible_ep, "expert parallelism must divide the experts and the data-parallel ranks"),
    Limit(
        "ep-tp",
        lambda s: s.expert_parallel > 1 and any(mesh.tp > 1 for mesh in meshes(s)),
        "expert parallelism is driven without tensor parallelism",
    ),
)  # fmt: skip
"""Meshes that do not divide what they share out, or that are not driven together."""

GROUPS: tuple[Limit, ...] = (
    Limit("groups-decay", _decay_of_nothing, "a group's weight decay is a multiple of the optimizer's, which is 0"),
    Limit(
        "precision-aware-grad",
        lambda s: s.dtype.grad is not None and s.dtype.grad != (s.dtype.reduce or half_dtype(s.dtype) or "fp32"),
        "a precision-aware optimizer reads gradients in the dtype of their buffer (grad_reduce_in_fp32)",
        "megatron/core/optimizer/distrib_optimizer.py, _copy_model_grads_to_main_grads",
    ),
    Limit(
        "new-decay-groups",
        lambda s: has("new_decay")(s) and bool(group_decays(s, model_spec(s.model)) - {0.0}),
        "groups are matched by their multiple of the optimizer's weight decay, which new_decay changes",
    ),
)  # fmt: skip
"""Param groups and gradients whose settings depend on each other."""


def limits(contract: MegatronContract) -> tuple[Limit, ...]:
    """The limits within what the allow-lists of `AXES` leave."""
    return (*REFUSED, *DTYPES, _scales_on_a_device(contract), *SCALING, *OFFLOADING, *GATHERING, *MESHES, *GROUPS)


def _goes_back(scenario: Scenario) -> bool:
    """Whether ranks load with an older release than that which saved. The declared releases, of which `load_version`
    names one, are older than what a working tree or a commit is made for."""
    if scenario.load_version == "same":
        return False
    saved = scenario.release
    if not is_version(saved):
        return bool(saved)
    return is_version(scenario.load_version) and before(scenario.load_version, saved)


def _scales_on_a_device(contract: MegatronContract) -> Limit:
    return Limit(
        "scaled-state-device",
        lambda s: s.device != "cpu" and contract.has_scales(s),
        "the twin takes scales shard by shard in the emulated FusedAdam's arithmetic, which is not a GPU's",
    )


def constraints(contract: MegatronContract) -> tuple[Constraint, ...]:
    """The scenarios that have no single right answer under a contract, each with the reason."""
    return (
        Constraint(
            "load-version-older",
            "nobody promises that a release reads what a newer one wrote: checkpoints go from a release to itself or "
            "to a newer one, and a working tree or a commit counts as newer than all declared releases",
            _goes_back,
        ),
        Constraint(
            "offload-groups",
            "which elements CPU offload leaves to which kernel depends on the order of param groups, which releases "
            "change",
            lambda s: (
                contract.mixes_kernels(s) and s.optimizer.groups == "model" and len(model_spec(s.model).groups) > 1
            ),
        ),
        Constraint(
            "offload-experts",
            "experts that ranks share out have an optimizer of their own: offload leaves one kernel to all of it or "
            "none",
            lambda s: s.expert_parallel > 1 and contract.mixes_kernels(s),
        ),
    )


AXES: dict[str, Allowed | Parts] = {
    "model": Anything(),
    "mesh": Anything(),
    "load": Loads("same", "grow", "shrink", "indivisible", "tp_change"),
    "expert_parallel": Anything(),
    "load_version": Anything(),
    "sharding": Only("zero1", "replicate", because="DDP shards the optimizer, or nothing"),
    "dtype": Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", "mixed", "mixed_fp16"),
        param=Only(None, because="the forward computes in the storage dtype"),
        output=Only(None, because="the forward computes in the storage dtype"),
        reduce=Only(None, "fp32", "bf16", "fp16"),
        master=Only(None, "fp32", "fp16", because="FusedAdam keeps masters in fp32 or fp16"),
        grad=Only(None, "fp32", "bf16", "fp16"),
        exp_avg=Only(None, "fp32", "bf16", "fp16", "fp8e4m3"),
        exp_avg_sq=Only(None, "fp32", "bf16", "fp16", "fp8e4m3"),
    ),
    "reshard_after_forward": Only("true", because="it is an axis of parameter sharding"),
    "offload": Parts(Offload, fraction=Anything()),
    "optimizer": Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw"),
        impl=Only(
            "multi_tensor",
            "forloop",
            because="FusedAdam or FusedSGD, or torch's own where neither apex nor TE is there",
        ),
        schedule=Only("none", *OWN_SCHEDULES, because="OptimizerParamScheduler has no other"),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, because="the optimizer config has no Nesterov momentum"),
        capturable=Only(False, because="the optimizer config has no capturable"),
        **NUMBERS,
    ),
    "microbatches": Anything(),
    "grad_sync": Only("last", "uneven", because="gradients are reduced after a rank's last microbatch"),
    "program": Operations(
        ("build", "step", "overflow", "save", "load", "load_model_only", "reload_params"),
        because="parameters cannot join a built optimizer, so that none can be unfrozen",
    ),
    "seed": Anything(),
}
"""What the systems over Megatron-Core accept alike; each adds its checkpoint formats, switches, devices and faults."""
