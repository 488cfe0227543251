"""Which scenarios NeMo Automodel's pretrained loader, FSDP2 strategy and checkpointer run.

A scenario's storage dtype is what is asked of `from_pretrained` (`mixed`: "auto"), its other dtypes are FSDP2's mixed
precision policy, and options say what the checkpoint file holds and what the model pins.
"""

from __future__ import annotations

from shardproof.loading import as_loaded
from shardproof.mechanisms.fsdp2 import limits as fsdp2
from shardproof.mechanisms.param_scheduler import OWN_SCHEDULES
from shardproof.models import draws, model_spec
from shardproof.program import does, meshes
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
    Words,
)
from shardproof.protocol.features import Feature, lacks
from shardproof.scenario import DTypePolicy, Offload, Optimizer, Scenario
from shardproof.systems.automodel import pretrained
from shardproof.systems.automodel.dtype_contract import RECIPE_PIPELINE, RECIPE_POLICY, RECIPE_STORAGE
from shardproof.systems.automodel.models import HF_SPECS, REAL, REAL_NEMOTRON, REAL_QWEN
from shardproof.systems.automodel.pretrained import (
    BY_DTYPE,
    CONSOLIDATED,
    FILE_BF16,
    FILE_FP16,
    FILE_FP32,
    PINNED,
    PINNED_SOFT,
    REPLICATED,
)

CHECKPOINTS: dict[str, tuple[str, ...]] = {"safetensors": (), "torch_save": ()}
"""Automodel's formats of the model; the optimizer is a distributed checkpoint in both."""

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
    """Whether FSDP2 alone would be given trainable parameters of two storage dtypes in one unit, which it refuses.
    The root unit always holds some of the bulk, and so does every layer, so that any trainable island is enough."""
    if scenario.fact("options", _by_dtype) or pretrained.native(scenario):
        return False
    trainable = [p.spec for p in model_spec(scenario.model).unique_params if p.spec.trainable == "yes"]
    found = {pretrained.trained_storage(scenario, spec) for spec in trainable}
    return len(found) > 1 and any(mesh.world > 1 for mesh in meshes(scenario))


def _by_dtype(options: tuple[str, ...]) -> bool:
    return BY_DTYPE in options


_NO_RESHARD = "unexpected keyword argument 'reshard_after_forward'"

_NATIVE = {
    REAL_QWEN: Feature("native_qwen", "0.5.0", "components/models/qwen3_5/model.py: Qwen3_5ForCausalLM"),
    REAL_NEMOTRON: Feature(
        "native_nemotron", "0.6.0", "components/models/nemotron_v3/layers.py: NemotronV3MambaFP32Params"
    ),
}
"""Automodel's own class of a model, as it is driven here."""
_RESHARD = Feature("reshard_field", "0.5.0", "components/distributed/config.py: FSDP2Config.reshard_after_forward")
_RESHARD_BY_DTYPE = Feature(
    "reshard_by_dtype",
    "0.6.0",
    "components/distributed/parallelizer_utils.py: fully_shard_by_dtype(reshard_after_forward)",
)
_REPLICATES = Feature(
    "replicates_frozen", "0.6.0", "components/distributed/config.py: MultimodalDistributedConfig.frozen_sharding"
)
_OWNED_PARALLELIZER = Feature(
    "owned_parallelizer", "0.7.0", "components/distributed/parallelizer.py: ModelParallelizer"
)
CLIPS = Feature("sorts_gradients_by_mesh", "0.6.0", "components/training/utils.py: _combine_norms")
"""`clip_grad_norm` that adds up the squares of gradients in double precision. Earlier ones round on the way, as
no oracle here does: there torch's clips, where all gradients are on one mesh."""
_GENERATORS_AS_TENSORS = Feature("generators_as_tensors", "0.6.0", "components/training/rng.py: _RNGState")
_STORAGE_RESOLVED = Feature(
    "storage_resolved", "0.5.0", "components/optim/precision_warnings.py: resolve_storage_dtype", until="0.7.0"
)
FEATURES = (
    *_NATIVE.values(), _RESHARD, _RESHARD_BY_DTYPE, _REPLICATES, _OWNED_PARALLELIZER, _GENERATORS_AS_TENSORS,
    _STORAGE_RESOLVED, CLIPS,
)  # fmt: skip
"""What limits ask of a release or of a tree's source."""

LIMITS: tuple[Limit, ...] = (
    Limit(
        "native-release",
        lambda s: s.model in _NATIVE and lacks(s, _NATIVE[s.model]),
        "automodel has its own Qwen3.5 from 0.5.0 on, and from 0.6.0 on a Nemotron-H with a module for fp32 parameters",
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
        lambda s: REPLICATED in s.options and lacks(s, _REPLICATES),
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
        lambda s: s.model in REAL and fsdp2.tensor_parallel(s),
        "a real model's plan of tensor parallelism lays its activations out, which the probe does not compute",
    ),
    Limit(
        "by-dtype-tensor-parallel",
        lambda s: BY_DTYPE in s.options and lacks(s, _OWNED_PARALLELIZER) and fsdp2.tensor_parallel(s),
        "releases before 0.7.0 are given a strategy of ours that shards by dtype, and does not cut",
    ),
    Limit(
        "clip-tensor-parallel",
        lambda s: s.optimizer.clip > 0 and fsdp2.tensor_parallel(s) and lacks(s, CLIPS),
        "before 0.6.0 torch clips here, which takes gradients of one mesh, and not automodel's own clip_grad_norm",
        "components/training/utils.py, clip_grad_norm",
        LibraryError(
            "RuntimeError",
            "must have the same mesh",
            "step",
            {"version": "0.5.0", "mesh": "1x1x2", "optimizer": "adamw/clip=1.0", "program": "train"},
        ),
    ),
    Limit(
        "replicas-alone",
        lambda s: any(mesh.dp_replicate > 1 and mesh.dp_shard == 1 for mesh in meshes(s)),
        "automodel's FSDP2 strategy takes replicas of sharded models only",
        "components/distributed/mesh_utils.py, _create_fsdp2_device_mesh",
        LibraryError("ValueError", "must be less than dp_size", "build", {"mesh": "2x1x1", "program": "train"}),
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
    Limit(
        "generators-of-more-ranks",
        lambda s: draws(s.model) and does(s, "load") and any(m.world > s.mesh.world for m in meshes(s)),
        "automodel keeps the random generators of every rank in a file of its own, which a rank that is new has not",
        "components/checkpoint/checkpointing.py, load_on_global_ranks",
        LibraryError(
            "FileNotFoundError",
            "rank_2.pt",
            "load",
            {"model": "hf_dropout", "mesh": "1x2x1", "load": "grow", "program": "resume"},
        ),
    ),
    Limit(
        "generators-of-another-release",
        lambda s: draws(s.model) and len({lacks(each, _GENERATORS_AS_TENSORS) for each in (s, as_loaded(s))}) > 1,
        "from 0.6.0 on automodel keeps random generators as plain tensors, before as a pickled object, by another name",
        "components/training/rng.py, RNGState; allow_legacy_pickle_restore, which is off, takes the pickled one",
        LibraryError(
            "RuntimeError",
            "Refusing to load torch artifact",
            "load",
            {"version": "0.5.0", "load_version": "0.6.0", "model": "hf_dropout", "mesh": "1x2x1", "program": "restart"},
        ),
    ),
    Limit("one-pin", lambda s: {PINNED, PINNED_SOFT} <= set(s.options), "a model pins in one way"),
    Limit(
        "mixed-storage-unit",
        lambda s: _mixed_unit(s) and fsdp2.takes_steps(s),
        "FSDP2 takes one storage dtype for the trainable parameters of a unit; several need the option by_dtype",
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _init_mp_dtypes",
        LibraryError(
            "AssertionError",
            "FSDP expects uniform original parameter dtype",
            "step",
            {"dtype": "mixed", "program": "train"},
        ),
    ),
    Limit(
        "recipe-storage",
        lambda s: RECIPE_STORAGE in s.options and lacks(s, _STORAGE_RESOLVED),
        "recipes resolve a storage dtype in releases 0.5 and 0.6",
        "components/optim/precision_warnings.py, resolve_storage_dtype",
    ),
    Limit(
        "recipe-pipeline",
        lambda s: RECIPE_PIPELINE in s.options and not s.dtype.param,
        "the dtype between stages is that of a mixed precision policy: the policy must name a param dtype",
    ),
    Limit(
        "reshard-field",
        lambda s: s.reshard_after_forward != "none" and lacks(s, _RESHARD),
        "automodel 0.4.0 has no reshard_after_forward: it must be `none`",
        "components/distributed/config.py, FSDP2Config",
        LibraryError("TypeError", _NO_RESHARD, "build", {"version": "0.4.0", "reshard_after_forward": "true"}),
    ),
    Limit(
        "reshard-by-dtype",
        lambda s: s.reshard_after_forward != "none" and BY_DTYPE in s.options and lacks(s, _RESHARD_BY_DTYPE),
        "fully_shard_by_dtype takes no reshard_after_forward before 0.6.0: it must be `none`",
        "components/distributed/parallelizer_utils.py, fully_shard_by_dtype",
        LibraryError("TypeError", _NO_RESHARD, "build", {"version": "0.5.0", "options": "by_dtype"}),
    ),
)

ACCEPTS = Accepts(
    "automodel",
    model=Only(
        *(spec.name for spec in HF_SPECS), because="its parallelizer looks for a module list of layers, as in these"
    ),
    mesh=Anything(),
    load=Loads("same", "grow", "shrink", "indivisible", "tp_change"),
    load_dtype=Anything(),
    load_version=Anything(),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", "mixed", because="from_pretrained is asked for one dtype, or for `auto`"),
        param=Only(None, "fp32", "bf16", "fp16"),
        reduce=Only(None, "fp32", "bf16", "fp16"),
        output=Only(None, "fp32", "bf16", "fp16"),
        master=Only(None, because="FSDP2 keeps no separate masters: the storage dtype is the master"),
    ),
    sharding=Only("fully_shard", because="FSDP2 shards per parameter"),
    reshard_after_forward=Only("true", "false", "none"),
    offload=Parts(Offload, fraction=Only(0.0, 1.0, because="CPUOffloadPolicy offloads everything or nothing")),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw"),
        impl=Only("forloop", "foreach", "fused", because="the optimizer is torch.optim's"),
        schedule=Only(
            "none", "halve", *OWN_SCHEDULES, because="its OptimizerParamScheduler makes these, beside torch's StepLR"
        ),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Only(0.0, because="its recipes scale no loss"),
        nesterov=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    grad_sync=Only("last", "every"),
    checkpoint=Formats(CHECKPOINTS),
    program=Operations(EVERY_STEP),
    options=Words(OPTIONS),
    faults=Faults(),
    keeps=("draws",),
    seed=Anything(),
    limits=LIMITS,
    features=FEATURES,
)
