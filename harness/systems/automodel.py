"""NeMo Automodel's pretrained loading, dtype-aware FSDP2 sharding and checkpointer: what the parent knows of it.

A scenario's storage dtype is what is asked of `from_pretrained` (`mixed`: "auto"), its other dtypes are FSDP2's mixed
precision policy, and options say what the checkpoint file holds and what the model pins. Imports neither torch nor the
library.
"""

from __future__ import annotations

from harness.models import NamedParam, model_spec
from harness.oracle import pretrained
from harness.oracle.contracts import stages
from harness.oracle.dtype_contract import RECIPE_PIPELINE, RECIPE_POLICY, RECIPE_STORAGE
from harness.oracle.pretrained import (
    BY_DTYPE,
    CONSOLIDATED,
    FILE_BF16,
    FILE_FP16,
    FILE_FP32,
    PINNED,
    PINNED_SOFT,
    REPLICATED,
)
from harness.program import meshes
from harness.scenario import Scenario
from harness.systems import torch_fsdp2
from harness.systems.automodel_models import HF_SPECS, REAL, REAL_NEMOTRON, REAL_QWEN
from harness.systems.protocol import LibraryError, Limit, SystemInfo, first_reason
from harness.systems.registry import register

CHECKPOINTS = ("safetensors", "torch_save")
"""Automodel's formats of the model; the optimizer is a distributed checkpoint in both."""

STORAGE_RELEASES = ("0.5.0", "0.6.0")

OPTIONS = {
    FILE_BF16: "the checkpoint file holds every parameter in bf16, islands too",
    FILE_FP16: "the checkpoint file holds every parameter in fp16",
    FILE_FP32: "the checkpoint file holds every parameter in fp32",
    PINNED: "the model names its islands in _keep_in_fp32_modules_strict",
    PINNED_SOFT: "the model names its islands in _keep_in_fp32_modules",
    BY_DTYPE: "layers are sharded by fully_shard_by_dtype, as for models with parameters of several dtypes",
    CONSOLIDATED: "each save exports the model in the form and the dtypes of the checkpoint that it was loaded from",
    REPLICATED: "frozen towers are left out of FSDP2 and lie whole on every rank",
    RECIPE_PIPELINE: "a recipe's pipeline section without a dtype is parsed",
    RECIPE_POLICY: "recipes' texts that name no dtype or no mixed precision policy are parsed",
    RECIPE_STORAGE: "a recipe's storage dtype is resolved",
}


def _mixed_unit(scenario: Scenario) -> bool:
    """Whether FSDP2 alone is given trainable parameters of two storage dtypes: the root unit always holds some of the
    bulk, and so does every layer."""
    found = {stages(scenario, p.spec).storage for p in _trainable(scenario)}
    sharded = any(mesh.world > 1 for mesh in meshes(scenario))
    by_dtype = BY_DTYPE in scenario.options or pretrained.native(scenario)
    return sharded and not by_dtype and len(found) > 1


def _trainable(scenario: Scenario) -> list[NamedParam]:
    return [p for p in model_spec(scenario.model).unique_params if p.spec.trainable == "yes"]


_NO_RESHARD = LibraryError("TypeError", "unexpected keyword argument 'reshard_after_forward'", "build")

_STRATEGIES = ("0.4.0", "0.5.0", "0.6.0")

_NATIVE_NOT = {REAL_QWEN: ("0.4.0",), REAL_NEMOTRON: _STRATEGIES}

_OF_TORCH = ("scaler-fp16-gradients", "sharding", "master", "offload-fraction", "optimizer-impl", "schedule",
             "expert-parallel", "logical-faults")  # fmt: skip

LIMITS: tuple[Limit, ...] = (
    Limit(
        "checkpoint",
        lambda s: s.checkpoint not in CHECKPOINTS,
        "automodel has these checkpoint formats: " + ", ".join(CHECKPOINTS),
    ),
    Limit(
        "model",
        lambda s: s.model not in {spec.name for spec in HF_SPECS},
        "automodel's parallelizer looks for a module list of layers: " + ", ".join(spec.name for spec in HF_SPECS),
        "components/distributed/parallelizer.py, _extract_model_layers",
    ),
    Limit(
        "native-release",
        lambda s: s.version in _NATIVE_NOT.get(s.model, ()),
        "automodel has its own Qwen3.5 from 0.5.0 on, and from 0.7.0 on a Nemotron-H with a module for fp32 parameters",
        "components/models/qwen3_5, components/models/nemotron_v3",
    ),
    Limit(
        "native-model",
        lambda s: s.model in REAL and bool({BY_DTYPE, PINNED, PINNED_SOFT} & set(s.options)),
        "a real model says itself what is pinned and how its layers are sharded",
        "components/models/qwen3_5/parallelization.py",
    ),
    Limit(
        "replicated-release",
        lambda s: REPLICATED in s.options and s.version in ("0.4.0", "0.5.0"),
        "automodel leaves frozen towers out of FSDP2 from 0.6.0 on",
        "components/distributed/config.py, MultimodalDistributedConfig",
    ),
    Limit(
        "replicated-by-dtype",
        lambda s: {REPLICATED, BY_DTYPE} <= set(s.options),
        "what shards the layers of our models by dtype leaves no tower out",
    ),
    Limit(
        "tensor-parallel",
        lambda s: s.model in REAL and torch_fsdp2._tensor_parallel(s),
        "a real model's plan of tensor parallelism lays its activations out, which the probe does not compute",
    ),
    Limit(
        "by-dtype-tensor-parallel",
        lambda s: s.version in _STRATEGIES and BY_DTYPE in s.options and torch_fsdp2._tensor_parallel(s),
        "releases before 0.7.0 are given a strategy of ours that shards by dtype, and does not cut",
    ),
    Limit(
        "clip-tensor-parallel",
        lambda s: s.optimizer.clip > 0 and torch_fsdp2._tensor_parallel(s),
        "torch clips gradients of one mesh; automodel's own clip_grad_norm, which sorts them by mesh, is not driven",
        "components/training/utils.py, clip_grad_norm",
        LibraryError("RuntimeError", "must have the same mesh", "step"),
    ),
    Limit(
        "replicas-alone",
        lambda s: any(mesh.dp_replicate > 1 and mesh.dp_shard == 1 for mesh in meshes(s)),
        "automodel's FSDP2 strategy takes replicas of sharded models only",
        "components/distributed/mesh_utils.py, _create_fsdp2_device_mesh",
        LibraryError("ValueError", "must be less than dp_size", "build"),
    ),
    Limit(
        "one-file",
        lambda s: len({FILE_BF16, FILE_FP16, FILE_FP32} & set(s.options)) > 1,
        "a checkpoint file holds one of file_bf16, file_fp16, file_fp32",
    ),
    Limit(
        "consolidated",
        lambda s: CONSOLIDATED in s.options and s.checkpoint != "safetensors",
        "automodel exports what it saves as safetensors",
        "components/checkpoint/checkpointing.py, _should_write_hf_metadata",
    ),
    Limit("one-pin", lambda s: {PINNED, PINNED_SOFT} <= set(s.options), "a model pins in one way"),
    Limit(
        "mixed-storage-unit",
        lambda s: _mixed_unit(s) and torch_fsdp2._steps(s),
        "FSDP2 takes one storage dtype for the trainable parameters of a unit; several need the option by_dtype",
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _init_mp_dtypes",
        LibraryError("AssertionError", "FSDP expects uniform original parameter dtype", "step"),
    ),
    Limit(
        "recipe-storage",
        lambda s: RECIPE_STORAGE in s.options and s.version not in STORAGE_RELEASES,
        "recipes resolve a storage dtype in releases " + ", ".join(STORAGE_RELEASES),
        "components/optim/precision_warnings.py, resolve_storage_dtype",
    ),
    Limit(
        "recipe-pipeline",
        lambda s: RECIPE_PIPELINE in s.options and not s.dtype.param,
        "the dtype between stages is that of a mixed precision policy: the policy must name a param dtype",
    ),
    Limit(
        "options", lambda s: not set(s.options) <= set(OPTIONS), "automodel has these options: " + ", ".join(OPTIONS)
    ),
    Limit("loss-scale", lambda s: s.optimizer.loss_scale > 0, "automodel's recipes scale no loss"),
    Limit(
        "reshard-divisor",
        lambda s: s.reshard_after_forward.isdecimal(),
        "automodel's reshard_after_forward is true, false or unset",
    ),
    Limit(
        "reshard-field",
        lambda s: s.version == "0.4.0" and s.reshard_after_forward != "none",
        "automodel 0.4.0 has no reshard_after_forward: it must be `none`",
        "components/distributed/config.py, FSDP2Config",
        _NO_RESHARD,
    ),
    Limit(
        "reshard-by-dtype",
        lambda s: s.version == "0.5.0" and BY_DTYPE in s.options and s.reshard_after_forward != "none",
        "fully_shard_by_dtype takes no reshard_after_forward in 0.5.0: it must be `none`",
        "components/distributed/parallelizer_utils.py, fully_shard_by_dtype",
        _NO_RESHARD,
    ),
    *(limit for limit in torch_fsdp2.LIMITS if limit.id in _OF_TORCH),
)


def unsupported(scenario: Scenario) -> str | None:
    """Why the system cannot run a scenario; None where it can."""
    return first_reason(LIMITS, scenario)


INFO = register(
    SystemInfo(
        name="automodel",
        doc="NeMo Automodel's pretrained loader, FSDP2 strategy and checkpointer, unmodified, on gloo",
        world="fork",
        entry="harness.systems.automodel_rank:AutomodelRank",
        unsupported=unsupported,
        limits=LIMITS,
        distributions=("nemo-automodel", "torch"),
        emulated=("the CPU under the name of a CUDA device, while a model is loaded",),
        warm_up="harness.systems.automodel_rank:warm_up",
        package="nemo-automodel",
        options=OPTIONS,
    )
)
