"""What FSDP2 refuses, for every system whose parameters it shards. No torch.

Each limit with an `error` is a deliberate refusal of the library: `shardproof conformance` runs the scenario that the
limit names, and the real library must raise it. What raises by accident is a crash, and a finding.
"""

from __future__ import annotations

from shardproof.loading import grows, shrinks
from shardproof.models import model_spec, storage_dtype
from shardproof.oracle.contract import Clause
from shardproof.program import JOINS, does, meshes, operations
from shardproof.protocol.accepts import LibraryError, Limit
from shardproof.scenario import Scenario
from shardproof.sequences import joined_at_loads

CLAUSES = (
    Clause(
        "parameters compute in param_dtype, else in their storage dtype",
        "torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    Clause(
        "gradients accumulate and reduce in reduce_dtype, else in the compute dtype",
        "torch FSDPParam.to_accumulated_grad_if_needed",
    ),
    Clause(
        "the sharded gradient is cast to the storage dtype before the optimizer",
        "torch foreach_reduce, orig_dtype",
    ),
    Clause(
        "optimizer state has the dtype of the tensor it steps on",
        "torch.optim.adam._init_group, zeros_like",
    ),
    Clause(
        "dim 0 is sharded in torch.chunk order, inside the tp shard",
        "torch FSDPParam._init_sharded_param, _StridedShard",
    ),
)

MAX_FP16_LOSS_SCALE = 2048.0

IGNORED = "ignored"
"""The option that leaves parameters to the training loop."""


def takes_steps(scenario: Scenario) -> bool:
    """Whether the program has a forward pass, which is when FSDP2 looks at most of what it refuses."""
    return does(scenario, "step", "overflow")


def tensor_parallel(scenario: Scenario) -> bool:
    """Whether some mesh that the program runs on has tp > 1."""
    return scenario.mesh.tp > 1 or any(mesh.tp > 1 for mesh in meshes(scenario))


def _mixed_group(scenario: Scenario) -> bool:
    """Whether one FSDP parameter group holds trainable parameters of two storage dtypes."""
    if not scenario.dtype.storage.startswith("mixed"):
        return False
    groups: dict[str, set[str]] = {}
    for param in model_spec(scenario.model).unique_params:
        if param.spec.trainable == "yes":
            unit = param.module.path if param.module.unit else ""
            groups.setdefault(unit, set()).add(storage_dtype(scenario.dtype, param.spec))
    return any(len(dtypes) > 1 for dtypes in groups.values())


def _undivided(scenario: Scenario) -> bool:
    after = scenario.reshard_after_forward
    return after.isdecimal() and any(mesh.dp_shard % int(after) for mesh in meshes(scenario))


def _strict(scenario: Scenario, *switches: str) -> bool:
    """Whether a full state dict is loaded strictly, with these switches."""
    form, *given = scenario.checkpoint.split("+")
    return form == "full" and "no_strict" not in given and set(switches) <= set(given)


def _leaves_frozen_out_strictly(checkpoint: str) -> bool:
    """Of a full state dict torch misses nothing: what it lacks, the live model has."""
    form, *given = checkpoint.split("+")
    return form != "full" and "ignore_frozen" in given and "no_strict" not in given


_BIGGER = {"load_model": "dense+one", "program": "build step save restart build load"}
STRICT_MORE = Limit(
    "strict-more",
    lambda s: grows(s) and _strict(s) and does(s, "load", "load_optimizer_only"),
    "strict loading refuses a parameter whose state the checkpoint does not have; full+no_strict leaves it as it is",
    "torch/distributed/checkpoint/state_dict.py, _split_optim_state_dict",
    LibraryError(
        "RuntimeError",
        "Missing optimizer state for parameter 'one_more.weight' in checkpoint",
        "load",
        {"checkpoint": "full", **_BIGGER},
    ),
)
STRICT_MORE_BROADCAST = Limit(
    "strict-more-broadcast",
    lambda s: grows(s) and _strict(s, "broadcast_from_rank0"),
    "strict loading from rank 0 refuses a parameter that the checkpoint does not have",
    "torch/distributed/_state_dict_utils.py, _broadcast_state_dict",
    LibraryError(
        "RuntimeError",
        "Error(s) in loading state_dict",
        "load",
        {"checkpoint": "full+broadcast_from_rank0", **_BIGGER},
    ),
)
STRICT_FEWER = Limit(
    "strict-fewer",
    lambda s: shrinks(s) and _strict(s),
    "strict loading refuses a parameter that the model does not have; full+no_strict leaves it out",
    "torch/nn/modules/module.py, load_state_dict",
    LibraryError(
        "RuntimeError",
        "Error(s) in loading state_dict",
        "load",
        {"model": "dense+one", "load_model": "dense", "checkpoint": "full", "program": _BIGGER["program"]},
        may_hang=True,  # of ranks that are given nothing by rank 0, it alone has something to refuse
    ),
)


def _asks_for_each_key(checkpoint: str) -> bool:
    """Whether a load asks for the trainable parameters one by one, of which a save has left out the frozen ones."""
    form, *given = checkpoint.split("+")
    return form != "full" and "ignore_frozen" in given


def _loads_from_before_a_thaw(program: str) -> bool:
    """Whether a checkpoint of before parameters were unfrozen is loaded after that."""
    loads = joined_at_loads(operations(program), JOINS)
    return any(now and not then for word, then, now in loads if word != "recall")


STRICT_FROZEN = Limit(
    "strict-frozen",
    lambda s: (
        s.fact("checkpoint", _leaves_frozen_out_strictly)
        and any(p.spec.trainable == "no" for p in model_spec(s.model).params)
        and does(s, "load", "load_model_only")
    ),
    "strict loading misses the frozen parameters that ignore_frozen_params has left out; it goes with no_strict",
    "torch/nn/modules/module.py, load_state_dict",
    LibraryError(
        "RuntimeError",
        "Error(s) in loading state_dict",
        "load",
        {"model": "frozen_tower", "checkpoint": "dcp+ignore_frozen", "program": "build step save step load"},
    ),
)
LEFT_OUT_THAWED = Limit(
    "left-out-thawed",
    lambda s: s.fact("checkpoint", _asks_for_each_key) and s.fact("program", _loads_from_before_a_thaw),
    "a parameter that ignore_frozen_params has left out of a save is missing when it is asked for once it is trained",
    "torch/distributed/checkpoint/default_planner.py, create_default_local_load_plan",
    LibraryError(
        "RuntimeError",
        "Missing key in checkpoint state_dict",
        "load",
        {
            "model": "later",
            "checkpoint": "dcp+no_strict+ignore_frozen",
            "program": "build save unfreeze step load",
        },
    ),
)
MIXED_GROUP = Limit(
    "mixed-storage-group",
    lambda s: _mixed_group(s) and takes_steps(s),
    "FSDP2 takes one storage dtype for the trainable parameters of a group",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _init_mp_dtypes",
    LibraryError(
        "AssertionError",
        "FSDP expects uniform original parameter dtype",
        "step",
        {"model": "mixed_unit", "dtype": "mixed", "program": "train"},
    ),
)
SCALARS = Limit(
    "scalar-parameter",
    lambda s: IGNORED not in s.options and any(not p.spec.shape for p in model_spec(s.model).params),
    "FSDP2 shards dim 0, and takes no parameter that has none",
    "torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _verify_managed_param",
    LibraryError(
        "ValueError",
        "fully_shard doesn't support scalar parameters",
        "build",
        {"model": "scalars", "program": "build step"},
    ),
)
RESHARD_DIVISOR = Limit(
    "reshard-divisor",
    _undivided,
    "FSDP2 takes an integer reshard_after_forward only if it is a factor of dp_shard",
    "torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _get_post_forward_mesh_info",
    LibraryError("ValueError", "it should be a factor of", "build", {"reshard_after_forward": "3", "program": "train"}),
)
RESHARD_DIVISOR_TP = Limit(
    "reshard-divisor-tp",
    lambda s: s.reshard_after_forward.isdecimal() and tensor_parallel(s) and takes_steps(s),
    "FSDP2 cannot reshard parameters of a tensor-parallel module to a smaller mesh yet",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_sharded_post_forward",
    LibraryError(
        "NotImplementedError",
        "Resharding to smaller mesh is not supported for DTensor parameters",
        "step",
        {"mesh": "1x4x2", "reshard_after_forward": "2", "program": "train"},
        may_hang=True,  # it makes further meshes before it refuses, and ranks may wait for each other there
    ),
)
FUSED_SGD = Limit(
    "fused-sgd",
    lambda s: (s.optimizer.kind, s.optimizer.impl) == ("sgd", "fused") and takes_steps(s),
    "DTensor has no sharding strategy for the fused SGD kernel",
    "torch/distributed/tensor/_sharding_prop.py",
    LibraryError(
        "NotImplementedError",
        "aten._fused_sgd_.default does not have a sharding strategy",
        "step",
        {"optimizer": "sgd/impl=fused", "program": "train"},
    ),
)
SCALER_FP16 = Limit(
    "scaler-fp16-gradients",
    lambda s: s.optimizer.loss_scale > 0 and s.dtype.storage == "fp16" and takes_steps(s),
    "torch's GradScaler refuses to unscale fp16 gradients: fp16 storage needs no loss scale here",
    "torch/amp/grad_scaler.py, _unscale_grads_",
    LibraryError(
        "ValueError",
        "Attempting to unscale FP16 gradients",
        "step",
        {"dtype": "fp16", "optimizer": "adamw/loss_scale=1024.0", "program": "train"},
    ),
)
SCALER_BF16 = Limit(
    "scaler-bf16-gradients-cuda",
    lambda s: (
        s.optimizer.loss_scale > 0
        and (s.device, s.dtype.storage) == ("cuda", "bf16")
        and s.offload.fraction == 0
        and takes_steps(s)
    ),
    "torch's GradScaler has no kernel on a GPU that unscales bf16 gradients",
    "torch/amp/grad_scaler.py, _unscale_grads_",
    LibraryError(
        "NotImplementedError",
        "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
        "step",
        {"device": "cuda", "dtype": "bf16", "optimizer": "adamw/loss_scale=1024.0", "program": "train"},
    ),
)
FP16_RANGE = Limit(
    "fp16-range",
    lambda s: s.optimizer.loss_scale > MAX_FP16_LOSS_SCALE and "fp16" in (s.dtype.param, s.dtype.reduce),
    f"the probe's gradients, up to 4 in each of 3 microbatches of 2 uses, leave fp16's range with a loss scale "
    f"above {MAX_FP16_LOSS_SCALE:g}",
)
