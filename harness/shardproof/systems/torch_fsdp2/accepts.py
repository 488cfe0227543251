"""Which scenarios FSDP2 with distributed checkpoints runs. Its limits are those of
`shardproof.mechanisms.fsdp2.limits`."""

from __future__ import annotations

from collections.abc import Callable

from shardproof.loading import grows
from shardproof.mechanisms.fsdp2 import limits as fsdp2
from shardproof.mechanisms.fsdp2.formats import FORMATS, HUB
from shardproof.mechanisms.fsdp2.limits import IGNORED
from shardproof.models import model_spec
from shardproof.program import does, load_mesh
from shardproof.protocol.accepts import (
    EVERY_STEP,
    NUMBERS,
    OPEN_LOOP,
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
from shardproof.scenario import TORCH_SCHEDULES, DTypePolicy, Mesh, Offload, Optimizer, Scenario

AS_RETURNED = "as_returned"
OPTIONS = {
    AS_RETURNED: "state dicts are kept in memory as the library returned them, and no copies of them",
    IGNORED: "parameters of one dim or none are left to the training loop (ignored_params): plain tensors beside "
    "DTensors, or DTensors on the tensor-parallel mesh alone, whose gradients the loop itself averages over data-"
    "parallel ranks",
}


def is_ignored(scenario: Scenario, shape: tuple[int, ...]) -> bool:
    """Whether a parameter of that shape is left out of FSDP."""
    return IGNORED in scenario.options and len(shape) <= 1


def _in_one_file(checkpoint: str) -> bool:
    """Whether all parameters of a rank are written into one file of safetensors."""
    form, *options = checkpoint.split("+")
    return form == HUB and "two_files" not in options


def _policed(dtype: DTypePolicy) -> bool:
    return bool(dtype.param or dtype.reduce or dtype.output)


def _ignores(scenario: Scenario) -> bool:
    return any(is_ignored(scenario, param.spec.shape) for param in model_spec(scenario.model).unique_params)


def _mixed(name: str, refuses: Callable[[Optimizer], bool], reason: str, source: str, shown: str) -> Limit:
    """What torch does with all parameters at once, and refuses to do with plain tensors beside DTensors; `shown` is an
    optimizer that shows it."""
    axes = {"options": IGNORED, "optimizer": shown, "mesh": "1x2x1"}
    error = LibraryError("RuntimeError", "got mixed torch.Tensor and DTensor", "step", axes)
    return Limit(name, lambda s: _ignores(s) and refuses(s.optimizer), reason, source, error)


ACCEPTS = Accepts(
    "torch-fsdp2",
    keeps=("draws",),
    device=Only("cpu", "cuda"),
    model=Anything(),
    mesh=Anything(),
    load=Loads("same", "grow", "shrink", "indivisible", "tp_change"),
    load_dtype=Anything(),
    load_model=Anything(),
    load_optimizer=Anything(),
    load_version=Anything(),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", "mixed", "mixed_fp16"),
        param=Only(None, "fp32", "bf16", "fp16"),
        reduce=Only(None, "fp32", "bf16", "fp16"),
        output=Only(None, "fp32", "bf16", "fp16"),
        master=Only(None, because="FSDP2 keeps no separate masters: the storage dtype is the master"),
    ),
    sharding=Only("fully_shard", because="FSDP2 shards per parameter"),
    reshard_after_forward=Anything(),
    offload=Parts(Offload, fraction=Only(0.0, 1.0, because="CPUOffloadPolicy offloads everything or nothing")),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw", "muon"),
        impl=Only("forloop", "foreach", "fused", because="the optimizer is torch.optim's"),
        schedule=Only(*TORCH_SCHEDULES, because="torch has classes for these"),
        tensor_lr=Only(False, True),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, True),
        capturable=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    grad_sync=Only("last", "every"),
    checkpoint=Formats(FORMATS),
    program=Operations((*EVERY_STEP, *OPEN_LOOP)),
    options=Words(OPTIONS),
    faults=Faults(),
    seed=Anything(),
    limits=(
        fsdp2.MIXED_GROUP, fsdp2.SCALARS, fsdp2.RESHARD_DIVISOR, fsdp2.RESHARD_DIVISOR_TP, fsdp2.FUSED_SGD,
        fsdp2.SCALER_FP16, fsdp2.SCALER_BF16, fsdp2.FP16_RANGE, fsdp2.STRICT_MORE_BROADCAST, fsdp2.STRICT_MORE,
        fsdp2.STRICT_FEWER, fsdp2.STRICT_FROZEN,
        fsdp2.LEFT_OUT_THAWED,
        Limit(
            "as-returned-live",
            lambda s: AS_RETURNED in s.options and not (s.checkpoint.startswith("full") and s.mesh.world > 1),
            "as_returned needs a full state dict of several ranks: all tensors of any other one are the live ones, as "
            "those of torch's own state_dict() are",
        ),
        Limit(
            "as-returned-keeps",
            lambda s: AS_RETURNED in s.options and not does(s, "keep"),
            "as_returned needs a program that keeps state dicts in memory",
        ),
        Limit(
            "tied-safetensors",
            lambda s: s.fact("checkpoint", _in_one_file) and any(p.spec.tied_to for p in model_spec(s.model).params),
            "safetensors writes no two names of one tensor into a file, and refuses a state dict that has them",
            "safetensors/torch.py, _flatten",
            LibraryError("RuntimeError", "Some tensors share memory", "save", {"model": "tied", "checkpoint": HUB}),
        ),
        Limit(
            "ignored-none",
            lambda s: IGNORED in s.options and not _ignores(s),
            "ignored needs a model with parameters of one dim or none",
        ),
        Limit(
            "ignored-policy",
            lambda s: IGNORED in s.options and (_policed(s.dtype) or s.offload.fraction > 0),
            "MixedPrecisionPolicy and CPUOffloadPolicy say nothing about parameters that FSDP ignores",
        ),
        Limit(
            "ignored-sync",
            lambda s: (
                IGNORED in s.options
                and (s.grad_sync != "last" or any(p.spec.idle == "others" for p in model_spec(s.model).params))
            ),
            "the loop averages ignored gradients once a step, and all ranks have them",
        ),
        _mixed(
            "ignored-kernels",
            lambda o: o.impl != "forloop",
            "one kernel steps all parameters of a group, and takes no plain tensors beside DTensors; forloop does",
            "torch/distributed/tensor/_dispatch.py, unwrap_to_op_info",
            "adamw/groups=one",
        ),
        _mixed(
            "ignored-scaler",
            lambda o: bool(o.loss_scale),
            "GradScaler unscales all gradients in one kernel, and takes no plain tensors beside DTensors",
            "torch/amp/grad_scaler.py, _unscale_grads_",
            "adamw/impl=forloop/loss_scale=1024.0",
        ),
        _mixed(
            "ignored-clip",
            lambda o: bool(o.clip),
            "clip_grad_norm_ takes no plain tensors beside DTensors, and no DTensors of two meshes",
            "torch/nn/utils/clip_grad.py, _get_total_norm",
            "adamw/impl=forloop/clip=1.0",
        ),
    ),
    constraints=(
        Constraint(
            "begin-async",
            "the program begins a save and takes steps before it is over, which dcp.async_save alone can do",
            lambda s: does(s, "begin_save") and s.checkpoint.partition("+")[0] != "dcp-async",
        ),
        Constraint(
            "grows-momentum",
            "torch.distributed.checkpoint gives a parameter that the checkpoint does not know a momentum of zeros "
            "before the load; foreach SGD then steps its whole group in one kernel, which rounds otherwise in half "
            "precision",
            lambda s: (
                grows(s)
                and (s.optimizer.kind, s.optimizer.impl) == ("sgd", "foreach")
                and (s.load_dtype or s.dtype).storage != "fp32"
            ),
        ),
    ),
)  # fmt: skip
"""What FSDP2 with distributed checkpoints runs; a system over FSDP2 begins with these limits."""


def strided_unevenly(scenario: Scenario) -> bool:
    """Whether FSDP cannot share out evenly the rows that tensor parallelism has cut, on the first mesh or the second.

    For example, 6 rows over 2 tensor-parallel ranks are 3 and 3, which 2 FSDP ranks hold as 2 and 1.
    """
    meshes = [scenario.mesh, load_mesh(scenario)]
    cut = [p.spec.shape[0] for p in model_spec(scenario.model).unique_params if p.spec.tp_dim == 0]
    return any(_uneven(rows, mesh) for mesh in meshes if mesh and mesh.tp > 1 for rows in cut)


def _uneven(rows: int, mesh: Mesh) -> bool:
    most = -(-rows // mesh.tp)
    parts = {min(most, rows - start) for start in range(0, rows, most)}
    return any(part % mesh.dp_shard for part in parts)


PREDICATES = {"strided_unevenly": strided_unevenly}
