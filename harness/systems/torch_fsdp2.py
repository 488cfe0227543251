"""PyTorch's FSDP2 and distributed checkpoint (DCP), unmodified: what the parent knows of them.

Says which scenarios the system refuses and why, as data: every entry of `LIMITS` with an `error` is a
deliberate refusal of the library, checked against the real one by tests/conformance/test_torch_fsdp2.py;
entries without one are combinations that have no meaning for this system. Whatever else raises is a
crash, not a limit. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.models import model_spec, storage_dtype
from harness.program import meshes, operations
from harness.scenario import Scenario
from harness.systems.protocol import LibraryError, Limit, SystemInfo, first_reason
from harness.systems.registry import register

FORMATS: dict[str, tuple[str, ...]] = {
    "dcp": ("cpu_offload", "no_strict", "flatten"),
    "dcp-async": ("cpu_offload", "no_strict", "flatten"),
    "dcp-stateful": ("cpu_offload", "no_strict", "flatten"),
    "full": ("cpu_offload", "no_strict", "flatten", "broadcast_from_rank0"),
}
"""Checkpoint format → the options that may follow it, each after a `+`.

dcp: sharded state dicts of get_model_state_dict and get_optimizer_state_dict through dcp.save and dcp.load.
dcp-async: the same through dcp.async_save, waited for. dcp-stateful: one Stateful application object, as the
DCP recipe has it. full: gathered state dicts in one file that rank 0 writes with torch.save.
"""


@dataclass(frozen=True)
class CheckpointPlan:
    """A checkpoint format and the StateDictOptions that its text asks for."""

    form: str
    cpu_offload: bool = False
    strict: bool = True
    flatten: bool = False
    broadcast_from_rank0: bool = False


def checkpoint_plan(text: str) -> CheckpointPlan | None:
    """The plan that a scenario's `checkpoint` text names; None where this system does not know it."""
    form, *options = text.split("+")
    if form not in FORMATS or not set(options) <= set(FORMATS[form]) or len(set(options)) != len(options):
        return None
    return CheckpointPlan(
        form,
        cpu_offload="cpu_offload" in options,
        strict="no_strict" not in options,
        flatten="flatten" in options,
        broadcast_from_rank0="broadcast_from_rank0" in options,
    )


def _mixed_group(scenario: Scenario) -> bool:
    """Whether one FSDP parameter group holds trainable parameters of two storage dtypes."""
    groups: dict[str, set[str]] = {}
    for param in model_spec(scenario.model).unique_params:
        if param.spec.trainable == "yes":
            unit = param.module.path if param.module.unit else ""
            groups.setdefault(unit, set()).add(storage_dtype(scenario.dtype, param.spec))
    return any(len(dtypes) > 1 for dtypes in groups.values())


def _steps(scenario: Scenario) -> bool:
    return bool({"step", "overflow"} & set(operations(scenario.program)))


def _tensor_parallel(scenario: Scenario) -> bool:
    """Whether some mesh that the program runs on has tp > 1."""
    return any(mesh.tp > 1 for mesh in meshes(scenario))


def _undivided(scenario: Scenario) -> bool:
    after = scenario.reshard_after_forward
    return after.isdecimal() and any(mesh.dp_shard % int(after) for mesh in meshes(scenario))


MAX_FP16_LOSS_SCALE = 2048.0

LIMITS: tuple[Limit, ...] = (
    Limit(
        "mixed-storage-group",
        lambda s: _mixed_group(s) and _steps(s),
        "FSDP2 takes one storage dtype for the trainable parameters of a group",
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _init_mp_dtypes",
        LibraryError("AssertionError", "FSDP expects uniform original parameter dtype", "step"),
    ),
    Limit(
        "reshard-divisor",
        _undivided,
        "FSDP2 takes an integer reshard_after_forward only if it is a factor of dp_shard",
        "torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _get_post_forward_mesh_info",
        LibraryError("ValueError", "it should be a factor of", "build"),
    ),
    Limit(
        "reshard-divisor-tp",
        lambda s: s.reshard_after_forward.isdecimal() and _tensor_parallel(s) and _steps(s),
        "FSDP2 cannot reshard parameters of a tensor-parallel module to a smaller mesh yet",
        "torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_sharded_post_forward",
        LibraryError(
            "NotImplementedError", "Resharding to smaller mesh is not supported for DTensor parameters", "step"
        ),
    ),
    Limit(
        "fused-sgd",
        lambda s: (s.optimizer.kind, s.optimizer.impl) == ("sgd", "fused") and _steps(s),
        "DTensor has no sharding strategy for the fused SGD kernel",
        "torch/distributed/tensor/_sharding_prop.py",
        LibraryError("NotImplementedError", "aten._fused_sgd_.default does not have a sharding strategy", "step"),
    ),
    Limit(
        "scaler-fp16-gradients",
        lambda s: s.optimizer.loss_scale > 0 and s.dtype.storage == "fp16" and _steps(s),
        "torch's GradScaler refuses to unscale fp16 gradients: fp16 storage needs no loss scale here",
        "torch/amp/grad_scaler.py, _unscale_grads_",
        LibraryError("ValueError", "Attempting to unscale FP16 gradients", "step"),
    ),
    Limit("sharding", lambda s: s.sharding != "fully_shard", "FSDP2 shards per parameter: sharding is fully_shard"),
    Limit(
        "master",
        lambda s: s.dtype.master is not None,
        "FSDP2 keeps no separate masters: the storage dtype is the master",
    ),
    Limit(
        "offload-fraction",
        lambda s: s.offload.fraction not in (0.0, 1.0),
        "CPUOffloadPolicy offloads everything or nothing",
    ),
    Limit(
        "checkpoint",
        lambda s: checkpoint_plan(s.checkpoint) is None,
        "torch has these checkpoint formats: "
        + ", ".join("".join([form, *(f"[+{o}]" for o in options)]) for form, options in FORMATS.items()),
    ),
    Limit(
        "fp16-range",
        lambda s: s.optimizer.loss_scale > MAX_FP16_LOSS_SCALE and "fp16" in (s.dtype.param, s.dtype.reduce),
        f"the probe's gradients, up to 4 in each of 3 microbatches of 2 uses, leave fp16's range with a loss scale "
        f"above {MAX_FP16_LOSS_SCALE:g}",
    ),
    Limit(
        "optimizer-impl",
        lambda s: s.optimizer.impl == "multi_tensor",
        "the optimizer is torch.optim's: FusedAdam and FusedSGD belong to megatron-core",
    ),
    Limit("schedule", lambda s: s.optimizer.schedule == "linear", "the linear schedule is Megatron's"),
    Limit("options", lambda s: bool(s.options), "FSDP2 has no switches of its own here"),
    Limit("expert-parallel", lambda s: s.expert_parallel > 1, "FSDP2 does not share experts out"),
    Limit(
        "logical-faults",
        lambda s: any(not fault.startswith("boundary.") for fault in s.faults),
        "logical faults mutate the reference; this system runs unmodified",
    ),
)


def unsupported(scenario: Scenario) -> str | None:
    """Why FSDP2 with DCP cannot run a scenario; None where it can."""
    return first_reason(LIMITS, scenario)


INFO = register(
    SystemInfo(
        name="torch-fsdp2",
        doc="PyTorch FSDP2 (fully_shard) with distributed checkpoint, unmodified, on gloo or on GPUs",
        world="fork",
        entry="harness.systems.torch_fsdp2_rank:Fsdp2Rank",
        unsupported=unsupported,
        limits=LIMITS,
        distributions=("torch",),
        warm_up="harness.systems.torch_fsdp2_rank:warm_up",
        devices=("cpu", "cuda"),
    )
)
