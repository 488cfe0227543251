"""NVIDIA Megatron-Core's optimizers and DistributedDataParallel, unmodified: what the parent knows of them.

Says which scenarios the system refuses and why, as data: every entry of `LIMITS` with an `error` is a deliberate
refusal of the library, checked against the real one by tests/conformance/test_megatron_core.py; entries without one
are combinations that have no meaning for this system, or that a machine without a GPU cannot run. Whatever else
raises is a crash, not a limit. Imports neither torch nor the library.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.models import ModelSpec, ParamSpec, model_spec, storage_dtype
from harness.oracle.contracts import has_scales
from harness.program import meshes, operations
from harness.scenario import Mesh, Scenario
from harness.systems import megatron_core_formats as formats
from harness.systems.protocol import LibraryError, Limit, SystemInfo, first_reason
from harness.systems.registry import register

OPTIONS: dict[str, str] = {
    "average_in_collective": "DDP averages in the collective instead of scaling before it",
    "fsdp_optim": "Megatron-FSDP in place of DDP, sharding optimizer state (data_parallel_sharding_strategy=optim)",
    "fsdp_optim_grads": "Megatron-FSDP, sharding optimizer state and gradients",
    "fsdp_optim_grads_params": "Megatron-FSDP, sharding parameters too; every module is a unit",
    "local_state": "FusedAdam keeps the state of DTensors as plain local tensors, as TransformerEngine's did between "
    "its pull requests 2698 and 2795 (March and April 2026)",
    "new_decay": "every later build asks for another weight decay, which a load must replace by the checkpoint's",
    "no_initialization": "layers skip their own initialisation (perform_initialization), as before a load",
    "one_bucket": "DDP's default bucket size, which holds a whole tiny model, in place of small buckets",
    "overlap_grad_reduce": "DDP reduces each bucket of gradients as soon as it is ready",
    "overlap_offload": "the host's part of the optimizer steps parameter by parameter (overlap_cpu_optimizer_d2h_h2d)",
    "overlap_param_gather": "DDP gathers parameters bucket by bucket in the next forward",
    "precision_aware": "use_precision_aware_optimizer: masters and moments live in FusedAdam, in dtypes of their own",
    "torch_offload": "use_torch_optimizer_for_cpu_offload",
}
"""Switch of the `options` axis → what it does."""

BUCKET_SIZE = 48
"""Elements after which DDP closes a bucket: a few parameters of a tiny model. The library looks at it only with
overlap_grad_reduce; without it a buffer is one bucket."""

GPT_MODEL = "gpt"
"""The model that is a real GPTModel; all others are trees of MegatronModule with hand-registered parameters."""

SCHEDULE_STEPS = 8
"""Steps in which the linear schedule goes from the learning rate to 0."""

MAX_FP16_LOSS_SCALE = 2048.0

Rule = Callable[[Scenario], bool]


def variant(scenario: Scenario) -> str:
    """Which environment a scenario's ranks need: with the emulated apex (`apex`), with the emulated optimizer of
    TransformerEngine beside it (`te`), or with neither (`plain`). The library looks for them once, when imported."""
    if scenario.optimizer.impl == "forloop":
        return "plain"
    return "te" if "precision_aware" in scenario.options else "apex"


def not_exercised(scenario: Scenario) -> tuple[str, ...]:
    """What the scenario asks for that ranks without a GPU cannot put to the test."""
    asked = [word for word in scenario.options if word.startswith("overlap_") and scenario.device == "cpu"]
    return tuple(f"{word}: streams and events of the emulated device do nothing" for word in asked)


def fsdp_strategy(scenario: Scenario) -> str | None:
    """Megatron-FSDP's `data_parallel_sharding_strategy`; None where the scenario is one of DDP."""
    return next(iter(_strategies(scenario)), None)


def _strategies(scenario: Scenario) -> list[str]:
    return [word.removeprefix("fsdp_") for word in scenario.options if word.startswith("fsdp_")]


def _has(*words: str) -> Rule:
    return lambda s: bool(set(words) & set(s.options))


def _halves(scenario: Scenario) -> bool:
    return scenario.dtype.storage != "fp32"


def _fp16(scenario: Scenario) -> bool:
    return scenario.dtype.storage in ("fp16", "mixed_fp16")


def half_dtype(scenario: Scenario) -> str | None:
    """The half-precision dtype that the scenario stores the bulk of the parameters in, if any."""
    return {"fp16": "fp16", "mixed_fp16": "fp16", "bf16": "bf16", "mixed": "bf16"}.get(scenario.dtype.storage)


def _reduces_otherwise(scenario: Scenario) -> bool:
    """A reduction dtype that DDP cannot give: it has the storage dtype, or fp32 for everything."""
    asked = scenario.dtype.reduce
    return asked is not None and asked != "fp32" and scenario.dtype.storage != asked


def _indivisible_tp(scenario: Scenario) -> bool:
    def uneven(spec: ParamSpec, mesh: Mesh) -> bool:
        return spec.tp_dim is not None and spec.shape[spec.tp_dim] % mesh.tp != 0

    params = model_spec(scenario.model).unique_params
    return any(uneven(p.spec, mesh) for mesh in meshes(scenario) for p in params)


def _indivisible_ep(scenario: Scenario) -> bool:
    ep = scenario.expert_parallel
    experts = {p.spec.shape[p.spec.ep_dim] for p in model_spec(scenario.model).params if p.spec.ep_dim is not None}
    return any(count % ep for count in experts) or any(mesh.dp % ep for mesh in meshes(scenario))


def _indivisible_instances(scenario: Scenario) -> bool:
    ep = scenario.expert_parallel
    return ep > 1 and any(mesh.dp % ep == 0 and mesh.dp // ep % mesh.dp_replicate for mesh in meshes(scenario))


def _rounds_average(scenario: Scenario) -> bool:
    """Whether seven ranks average a gradient that needs all of fp32's digits. Half precision is rounded back."""
    fp32 = scenario.dtype.reduce == "fp32" or any(
        storage_dtype(scenario.dtype, p.spec) == "fp32" for p in model_spec(scenario.model).unique_params
    )
    return fp32 and any(mesh.dp == 7 for mesh in meshes(scenario))


def _group_decays(scenario: Scenario, model: ModelSpec) -> set[float]:
    """The weight decays that the model's groups ask for, besides the optimizer's own."""
    if scenario.optimizer.groups == "one":
        return set()
    return {g.weight_decay for g in model.groups if g.weight_decay is not None}


def _old_group_limits(scenario: Scenario) -> bool:
    """Groups that the API before 0.16 cannot say: no decay or the usual one, one multiplier of the learning rate."""
    if formats.release_of(scenario.version) >= (0, 16, 0):
        return False
    model = model_spec(scenario.model)
    scales = {g.lr_scale for g in model.groups} - {1.0} if scenario.optimizer.groups == "model" else set()
    return bool(_group_decays(scenario, model) - {0.0, scenario.optimizer.weight_decay}) or len(scales) > 1


def _decay_of_nothing(scenario: Scenario) -> bool:
    return not scenario.optimizer.weight_decay and bool(_group_decays(scenario, model_spec(scenario.model)) - {0.0})


def _precision_aware_dtypes(scenario: Scenario) -> bool:
    policy = scenario.dtype
    return any(d not in (None, "fp32") for d in (policy.grad, policy.master, policy.exp_avg, policy.exp_avg_sq))


def _before(*release: int) -> Rule:
    return lambda s: formats.release_of(s.version) < release


def _unused_in_bucket(scenario: Scenario) -> bool:
    """Whether a bucket holds a parameter that gets a gradient beside one that never gets any."""
    params = [p for p in model_spec(scenario.model).unique_params if p.spec.trainable == "yes"]
    steps = operations(scenario.program).count("step") + operations(scenario.program).count("overflow")
    return steps > 1 and any(not p.spec.used for p in params)


def _mixes_unit_gradients(scenario: Scenario) -> bool:
    """Whether several instances of the optimizer reduce gradients of two dtypes of one module."""
    if scenario.dtype.reduce == "fp32" or all(mesh.dp_replicate == 1 for mesh in meshes(scenario)):
        return False
    modules = model_spec(scenario.model).modules
    return any(len({storage_dtype(scenario.dtype, param) for param in m.params}) > 1 for m in modules)


LIMITS: tuple[Limit, ...] = (
    Limit(
        "precision-aware-without-te",
        lambda s: _has("precision_aware")(s) and s.optimizer.impl == "forloop",
        "the precision-aware optimizer needs TransformerEngine; without it the library compares its version with None",
        "megatron/core/optimizer/optimizer_config.py, __post_init__",
    ),
    Limit(
        "precision-aware-replicate",
        lambda s: _has("precision_aware")(s) and s.sharding == "replicate" and s.optimizer.kind != "sgd",
        "the precision-aware optimizer is a distributed one",
        "megatron/core/optimizer/optimizer_config.py, __post_init__",
        LibraryError("AssertionError", "only supported with distributed optimizer", "build"),
    ),
    Limit(
        "precision-aware-sgd",
        lambda s: _has("precision_aware")(s) and s.optimizer.kind == "sgd",
        "the precision-aware optimizer is Adam",
        "megatron/core/optimizer/optimizer_config.py, __post_init__",
        LibraryError("AssertionError", "only supported with adam", "build"),
    ),
    Limit(
        "dtypes-without-precision-aware",
        lambda s: _precision_aware_dtypes(s) and not _has("precision_aware")(s),
        "gradients, masters and moments in half are the precision-aware optimizer's",
        "megatron/core/optimizer/optimizer_config.py, __post_init__",
        LibraryError("AssertionError", "can only be fp32 when not using precision-aware optimizer", "build"),
    ),
    Limit(
        "distributed-sgd",
        lambda s: s.sharding == "zero1" and s.optimizer.kind == "sgd" and not s.offload.fraction,
        "the distributed optimizer takes Adam only",
        "megatron/core/optimizer/distrib_optimizer.py, __init__",
        LibraryError("AssertionError", "Only Adam and HybridDeviceOptimizer currently supported", "build"),
    ),
    Limit(
        "offload-l2",
        lambda s: s.offload.fraction > 0 and s.optimizer.kind == "adam" and not _before(0, 15, 0)(s),
        "offload steps with AdamW only",
        "megatron/core/optimizer/__init__.py, _get_megatron_optimizer_based_on_param_groups",
        LibraryError("AssertionError", "CPU offloading only supported with decoupled_weight_decay", "build"),
    ),
    Limit(
        "overlap-unused",
        lambda s: _has("overlap_grad_reduce")(s) and _unused_in_bucket(s),
        "with overlap_grad_reduce every parameter of a bucket must get a gradient",
        "megatron/core/distributed/param_and_grad_buffer.py, _ParamAndGradBucketGroup.reset",
        LibraryError("AssertionError", "", "step"),
    ),
    Limit(
        "expert-instances",
        _indivisible_instances,
        "distributed optimizer instances must divide the data-parallel ranks of an expert",
        "megatron/core/parallel_state.py, initialize_model_parallel",
        LibraryError("AssertionError", "Expert data parallel size should be divisible by partial DistOpt", "build"),
    ),
    Limit(
        "average-of-seven",
        _rounds_average,
        "DDP averages by multiplying with 1/7, which fp32 rounds: sums of the exact grid are no longer exact",
        "megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync",
    ),
    Limit(
        "fsdp-strategy",
        lambda s: formats.under_fsdp(s) and (s.sharding != "zero1" or len(_strategies(s)) > 1),
        "Megatron-FSDP is driven with a distributed optimizer (sharding=zero1), and has one sharding strategy",
    ),
    Limit("fsdp-013", lambda s: formats.under_fsdp(s) and _before(0, 14, 0)(s), "fsdp_dtensor came with 0.14"),
    Limit(
        "fsdp-device-mesh",
        lambda s: formats.under_fsdp(s) and (0, 14, 0) <= formats.release_of(s.version) < (0, 15, 2),
        "Megatron-FSDP of 0.14.0 to 0.15.1 reads a private part of DeviceMesh that torch 2.13 has no more",
        "megatron/core/distributed/fsdp/src/megatron_fsdp/utils.py, get_mesh_names",
        LibraryError("AttributeError", "child_to_root_mapping", "build"),
    ),
    Limit(
        "fsdp-offload",
        lambda s: formats.under_fsdp(s) and 0 < s.offload.fraction < 1,
        "which part of the parameters is on the host is known for DDP's buffers only",
    ),
    Limit(
        "fsdp-instances-mixed",
        lambda s: fsdp_strategy(s) == "optim_grads_params" and s.device == "cpu" and _mixes_unit_gradients(s),
        "instances of the optimizer reduce a unit's gradients of two dtypes in one call, which gloo does not take",
    ),
    Limit(
        "fsdp-precision-aware",
        lambda s: formats.under_fsdp(s) and _has("precision_aware")(s),
        "the precision-aware optimizer is driven with DDP",
    ),
    Limit(
        "fsdp-experts",
        lambda s: formats.under_fsdp(s) and s.expert_parallel > 1,
        "expert parallelism is driven with DDP",
    ),
    Limit(
        "local-state",
        lambda s: _has("local_state")(s) and (not formats.under_fsdp(s) or s.optimizer.impl != "multi_tensor"),
        "local_state is a way in which FusedAdam keeps the state of Megatron-FSDP's parameters",
    ),
    Limit("sharding", lambda s: s.sharding == "fully_shard", "DDP shards the optimizer (zero1) or nothing (replicate)"),
    Limit(
        "reshard-after-forward",
        lambda s: s.reshard_after_forward != "true",
        "reshard_after_forward is an axis of parameter sharding",
    ),
    Limit("grad-sync", lambda s: s.grad_sync != "last", "gradients are reduced after the last microbatch"),
    Limit("options", lambda s: not set(s.options) <= OPTIONS.keys(), "megatron-core has these options: "
          + ", ".join(OPTIONS)),
    Limit(
        "dtype-stages",
        lambda s: s.dtype.param is not None or s.dtype.output is not None,
        "the forward computes in the storage dtype; it has no other param or output dtype",
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
    Limit(
        "master-bf16",
        lambda s: s.dtype.master == "bf16",
        "FusedAdam keeps masters in fp32 or fp16",
    ),
    Limit(
        "scaled-state-device",
        lambda s: s.device != "cpu" and has_scales(s),
        "the twin takes scales shard by shard in the emulated FusedAdam's arithmetic, which is not a GPU's",
    ),
    Limit(
        "optimizer-impl",
        lambda s: s.optimizer.impl not in ("multi_tensor", "forloop"),
        "the optimizer is FusedAdam or FusedSGD (impl=multi_tensor) or, without apex, torch's own (impl=forloop)",
    ),
    Limit("capturable", lambda s: s.optimizer.capturable, "the optimizer config has no capturable"),
    Limit("nesterov", lambda s: s.optimizer.nesterov, "the optimizer config has no Nesterov momentum"),
    Limit(
        "l2-before-015",
        lambda s: s.optimizer.kind == "adam" and _before(0, 15, 0)(s),
        "releases before 0.15 have no switch for decoupled_weight_decay: Adam is always AdamW",
    ),
    Limit("schedule", lambda s: s.optimizer.schedule == "halve", "OptimizerParamScheduler has no halving schedule"),
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
    Limit("offload-sgd", lambda s: s.offload.fraction > 0 and s.optimizer.kind == "sgd", "offload is driven with Adam"),
    Limit(
        "offload-options",
        lambda s: _has("torch_offload", "overlap_offload")(s) and not s.offload.fraction,
        "torch_offload and overlap_offload are ways to offload",
    ),
    Limit(
        "gather-replicate",
        lambda s: _has("overlap_param_gather")(s) and s.sharding == "replicate",
        "only a distributed optimizer gathers parameters",
    ),
    Limit(
        "gather-reduce",
        lambda s: _has("overlap_param_gather")(s) and not _has("overlap_grad_reduce")(s),
        "the training script allows overlap_param_gather only with overlap_grad_reduce",
        "megatron/training/arguments.py, validate_args",
    ),
    Limit(
        "instances-replicate",
        lambda s: s.sharding == "replicate" and any(mesh.dp_replicate > 1 for mesh in meshes(s)),
        "dp_replicate is the number of distributed optimizer instances: it needs zero1",
    ),
    Limit("tp-divides", _indivisible_tp, "tensor parallelism must divide the dims it shards"),
    Limit("ep-divides", _indivisible_ep, "expert parallelism must divide the experts and the data-parallel ranks"),
    Limit(
        "ep-tp",
        lambda s: s.expert_parallel > 1 and any(mesh.tp > 1 for mesh in meshes(s)),
        "expert parallelism is driven without tensor parallelism",
    ),
    Limit("groups-before-016", _old_group_limits, "groups of any weight decay or several rates came with 0.16"),
    Limit("groups-decay", _decay_of_nothing, "a group's weight decay is a multiple of the optimizer's, which is 0"),
    Limit(
        "precision-aware-grad",
        lambda s: s.dtype.grad is not None and s.dtype.grad != (s.dtype.reduce or half_dtype(s) or "fp32"),
        "a precision-aware optimizer reads gradients in the dtype of their buffer (grad_reduce_in_fp32)",
        "megatron/core/optimizer/distrib_optimizer.py, _copy_model_grads_to_main_grads",
    ),
    Limit(
        "new-decay-groups",
        lambda s: _has("new_decay")(s) and bool(_group_decays(s, model_spec(s.model)) - {0.0}),
        "groups are matched by their multiple of the optimizer's weight decay, which new_decay changes",
    ),
    Limit("unfreeze", lambda s: "unfreeze" in operations(s.program), "parameters cannot join a built optimizer"),
    Limit(
        "logical-faults",
        lambda s: any(not fault.startswith("boundary.") for fault in s.faults),
        "logical faults mutate the reference; this system runs unmodified",
    ),
    *formats.LIMITS,
)  # fmt: skip


def unsupported(scenario: Scenario) -> str | None:
    """Why Megatron-Core cannot run a scenario; None where it can."""
    return first_reason(LIMITS, scenario)


INFO = register(
    SystemInfo(
        name="megatron-core",
        doc="Megatron-Core's DDP and optimizers, unmodified, on gloo and an emulated CUDA device",
        world="fork",
        entry="harness.systems.megatron_core_rank:MegatronRank",
        unsupported=unsupported,
        limits=LIMITS,
        distributions=("megatron-core", "torch"),
        emulated=(
            "CUDA device",
            "apex and amp_C (impl=multi_tensor)",
            "TransformerEngine's FusedAdam (precision_aware)",
        ),
        warm_up="harness.systems.megatron_core_rank:warm_up",
        package="megatron-core",
        variant=variant,
        options=OPTIONS,
        not_exercised=not_exercised,
        owner_groups=True,
        devices=("cpu", "cuda"),
        library="harness.systems.megatron_core_rank:library",
    )
)
