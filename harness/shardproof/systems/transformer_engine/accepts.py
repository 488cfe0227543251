"""Which scenarios TransformerEngine's layers and FusedAdam run, beside what FSDP2 itself refuses."""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.emulation import te_choice
from shardproof.loading import switches
from shardproof.mechanisms import fused_adam
from shardproof.mechanisms.fsdp2 import limits as fsdp2
from shardproof.mechanisms.fsdp2.formats import FORMATS, HUB
from shardproof.mechanisms.fused_adam import REMAINDERS
from shardproof.models import ModelSpec, draws, model_spec
from shardproof.program import does, meshes, operations
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
from shardproof.systems.transformer_engine.contract import CONTRACT
from shardproof.systems.transformer_engine.switches import (
    CALIBRATING,
    FP8_CURRENT,
    FP8_DELAYED,
    NO_EXTRA_STATE,
    QUANTISED,
    TAGS,
    is_layers,
)

OPTIONS: dict[str, str] = {
    FP8_CURRENT: "matrices are quantised when layers are built: fp8e4m3 with one current scale each, of all shards",
    FP8_DELAYED: "matrices are quantised when layers are built: fp8e4m3 with the delayed scale of the recipe's state",
    "again": "the optimizer is given what a load has read twice, as a rollback that keeps it in memory does",
    CALIBRATING: "forwards run under autocast(calibrating=True) with DelayedScaling, so that layers have extra state",
    "capturable": "FusedAdam keeps its learning rate and step as tensors, for CUDA graphs",
    "meta": "layers are built on the meta device, sharded, and then given memory and values by reset_parameters",
    NO_EXTRA_STATE: "the layers' _extra_state is left out of checkpoints, and loads do not miss it",
    TAGS: "the marks that tensor-parallel layers leave on their parameters are observed: on a CPU before FSDP2 makes "
    "parameters of its own, with meta after reset_parameters",
    REMAINDERS: "store_param_remainders: of a bf16 parameter's fp32 master only the lower 16 bits are kept",
}
"""Switch of the `options` axis → what it does."""


def _indivisible_tp(scenario: Scenario) -> bool:
    def uneven(model: ModelSpec, tp: int) -> bool:
        return any(p.spec.tp_dim is not None and p.spec.shape[p.spec.tp_dim] % tp for p in model.params)

    return is_layers(scenario.model) and any(uneven(model_spec(scenario.model), m.tp) for m in meshes(scenario))


def _quantised(scenario: Scenario) -> bool:
    return any(option in scenario.options for option in QUANTISED)


def _own_dtypes(scenario: Scenario) -> bool:
    policy = scenario.dtype
    return any((policy.master, policy.exp_avg, policy.exp_avg_sq)) or "remainders" in scenario.options


_QUANTISED_ON_CPU = Feature(
    "quantised_on_cpu", "2.16.0", "pytorch/quantized_tensor.py: QuantizedTensor.untyped_storage"
)
"""What is made of a quantised tensor lies where that one lies. The method came with the same commit,
TransformerEngine#2974."""

LIMITS: tuple[Limit, ...] = (
    fsdp2.MIXED_GROUP, fsdp2.SCALARS, fsdp2.RESHARD_DIVISOR, fsdp2.RESHARD_DIVISOR_TP, fsdp2.FUSED_SGD,
    fsdp2.SCALER_FP16, fsdp2.SCALER_BF16, fsdp2.FP16_RANGE,
    Limit(
        "fused-sgd-here",
        lambda s: CONTRACT.fused(s) and s.optimizer.kind == "sgd",
        "FusedSGD is not driven here: its momentum has no state that a checkpoint of DCP restores",
    ),
    Limit("master-of-fp32", lambda s: s.dtype.storage == "fp32" and s.dtype.master is not None,
          "parameters in fp32 are their own masters"),
    Limit("torch-state", lambda s: not CONTRACT.fused(s) and _own_dtypes(s),
          "masters, and moments in dtypes of their own, are FusedAdam's: optimizer …/impl=multi_tensor"),
    Limit(
        "master-dtype",
        lambda s: s.dtype.master == "bf16",
        "FusedAdam keeps masters in fp32 or fp16",
        "transformer_engine/pytorch/optimizers/fused_adam.py, __init__",
        LibraryError(
            "RuntimeError", "FusedAdam only supports fp32/fp16 master weights", "build",
            {"optimizer": "adamw/impl=multi_tensor/groups=one", "dtype": "fp16/master=bf16"},
        ),
    ),
    Limit(
        "rests-in-another-dtype",
        lambda s: (
            CONTRACT.fused(s) and s.load_dtype is not None and any(p.spec.idle for p in model_spec(s.model).params)
        ),
        "a parameter that rests in the step after a load keeps what it was loaded as, and not what its master is: no "
        "oracle for that where the dtype of parameters is another one",
    ),
    Limit(
        "generators-device",
        lambda s: s.device != "cpu" and draws(s.model),
        "what a generator must hold is worked out with the emulated device's, whose numbers are not a GPU's",
    ),
    Limit("remainders-fp16", lambda s: "remainders" in s.options and s.dtype.master == "fp16",
          "remainders are those of fp32 masters"),
    Limit(
        "no-gradient",
        lambda s: (
            CONTRACT.fused(s) and any(not p.spec.used or p.spec.trainable != "yes" for p in model_spec(s.model).params)
        ),
        "FusedAdam makes zeros for a parameter that never has a gradient, and counts its steps: no oracle for that",
        "transformer_engine/pytorch/optimizers/fused_adam.py, step",
    ),
    Limit("remainders", lambda s: "remainders" in s.options and s.dtype.storage not in ("bf16", "mixed"),
          "remainders are kept of bf16 parameters"),
    Limit(
        "remainders-of-masters",
        lambda s: (
            switches(s, REMAINDERS) and REMAINDERS not in s.options
            and s.checkpoint.startswith("full") and does(s, "load", "load_optimizer_only")
        ),
        "FusedAdam with store_param_remainders takes remainders alone, and a checkpoint of another one has masters",
        "transformer_engine/pytorch/optimizers/fused_adam.py, set_scaled_state",
        LibraryError(
            "AssertionError", "", "load",
            {"optimizer": "adamw/impl=multi_tensor/groups=one", "dtype": "bf16/master=fp32", "program": "restart",
             "mesh": "1x2x1", "checkpoint": "full", "load_options": REMAINDERS},
        ),
    ),
    Limit("capturable-torch", lambda s: "capturable" in s.options and not CONTRACT.fused(s),
          "capturable is FusedAdam's switch here"),
    Limit(
        "capturable-remainders",
        lambda s: {"capturable", "remainders"} <= set(s.options),
        "CUDA graphs cannot capture steps with remainders",
        "transformer_engine/pytorch/optimizers/fused_adam.py, __init__",
        LibraryError(
            "RuntimeError", "Capturable mode doesn't support storing param remainders", "build",
            {"optimizer": "adamw/impl=multi_tensor/groups=one",
             "dtype": "bf16/master=fp32", "options": "capturable+remainders"},
        ),
    ),
    Limit(
        "capturable-moments",
        lambda s: "capturable" in s.options and (
            s.dtype.exp_avg != s.dtype.exp_avg_sq or "fp16" in (s.dtype.exp_avg, s.dtype.master)
        ),
        "CUDA graphs need both moments in fp32 or both in bf16, and fp32 masters",
        "transformer_engine/pytorch/optimizers/fused_adam.py, __init__",
        LibraryError(
            "RuntimeError", "Capturable mode", "build",
            {"optimizer": "adamw/impl=multi_tensor/groups=one",
             "dtype": "bf16/master=fp32/exp_avg=bf16", "options": "capturable"},
        ),
    ),
    Limit("meta", lambda s: "meta" in s.options and not is_layers(s.model), "meta builds the library's own layers"),
    Limit("tags", lambda s: TAGS in s.options and (not is_layers(s.model) or s.mesh.tp == 1),
          "the library's own layers mark parameters, under tensor parallelism"),
    Limit("quantised-layers", lambda s: _quantised(s) and not is_layers(s.model),
          "only the library's own layers have quantised parameters"),
    Limit(
        "quantised-releases",
        lambda s: _quantised(s) and lacks(s, _QUANTISED_ON_CPU),
        "before 2.16.0 whatever is made of a Float8Tensor that lies on a CPU is put on cuda",
        "transformer_engine/pytorch/quantized_tensor.py, make_like",
        LibraryError(
            "AssertionError", "Torch not compiled with CUDA enabled", "build",
            {"version": "2.15.0", "optimizer": "adamw/impl=multi_tensor/groups=one",
             "model": "te_layers", "dtype": "bf16/master=fp32", "options": "fp8_current"},
        ),
    ),
    Limit(
        "quantised-split",
        lambda s: _quantised(s) and s.model == "te_transformer",
        "query, key and value are weights of their own there, parts of one, which a quantised tensor has not",
        "transformer_engine/pytorch/module/layernorm_linear.py, __init__",
        LibraryError(
            "RuntimeError", "Splitting QuantizedTensor into multiple params is not supported", "build",
            {"optimizer": "adamw/impl=multi_tensor/groups=one", "model": "te_transformer",
             "dtype": "bf16/master=fp32", "options": "fp8_current"},
        ),
    ),
    Limit(
        "quantised-capturable",
        lambda s: _quantised(s) and "capturable" in s.options,
        "CUDA graphs cannot capture what writes quantised parameters",
        "transformer_engine/pytorch/optimizers/fused_adam.py, step",
        LibraryError(
            "RuntimeError", "with capturable=True", "step",
            {"optimizer": "adamw/impl=multi_tensor/groups=one", "model": "te_layers",
             "dtype": "bf16/master=fp32", "options": "capturable+fp8_current"},
        ),
    ),
    Limit(
        "quantised-master",
        lambda s: _quantised(s) and (not CONTRACT.fused(s) or (s.dtype.storage, s.dtype.master, s.dtype.param) !=
                                     ("bf16", "fp32", None)),
        "quantised parameters are stepped by FusedAdam through fp32 masters: dtype bf16/master=fp32",
    ),
    Limit(
        "quantised-programs",
        lambda s: _quantised(s) and "load_model_only" in operations(s.program),
        "no oracle for masters that are made of quantised parameters",
    ),
    Limit("quantised-tp", lambda s: _quantised(s) and any(m.tp > 1 for m in meshes(s)),
          "quantised parameters of tensor-parallel layers: transformer-engine-2713 stands in front of them"),
    Limit("quantised-once", lambda s: set(QUANTISED) <= set(s.options), "one recipe at a time"),
    Limit("quantised-remainders", lambda s: _quantised(s) and "remainders" in s.options, "masters are whole beside "
          "quantised parameters"),
    Limit("quantised-full", lambda s: _quantised(s) and s.checkpoint.partition("+")[0] == "full",
          "a full state dict holds dequantised values: no oracle for those"),
    Limit("calibrating", lambda s: CALIBRATING in s.options and (_quantised(s) or not is_layers(s.model)),
          "the library's own layers calibrate, and quantised ones are beyond it"),
    Limit("extra-state", lambda s: "no_extra_state" in s.options and not is_layers(s.model),
          "only the library's own layers have extra state"),
    Limit(
        "tp-divides",
        _indivisible_tp,
        "tensor parallelism must divide the dims that a layer shards",
        "transformer_engine/pytorch/utils.py, divide",
        LibraryError("ValueError", "is not divisible by", "build", {"model": "te_layers", "mesh": "1x1x4"}),
    ),
)  # fmt: skip


CHECKPOINTS = {form: tuple(s for s in given if s != "ignore_frozen") for form, given in FORMATS.items() if form != HUB}
"""Those of FSDP2 but safetensors, which have no place for the bytes that modules keep of their own."""

ACCEPTS = Accepts(
    "transformer-engine",
    keeps=("draws",),
    device=Only("cpu", "cuda"),
    model=Anything(),
    mesh=Anything(),
    load=Loads("same", "grow", "shrink", "indivisible", "tp_change"),
    load_dtype=Anything(),
    load_version=Anything(),
    dtype=Parts(
        DTypePolicy,
        storage=Only("fp32", "bf16", "fp16", "mixed", "mixed_fp16"),
        param=Only(None, "fp32", "bf16", "fp16"),
        reduce=Only(None, "fp32", "bf16", "fp16"),
        output=Only(None, "fp32", "bf16", "fp16"),
        master=Only(None, "fp32", "fp16", "bf16"),
        grad=Only(None, because="FSDP2 gives the gradient in the parameter's own dtype"),
        exp_avg=Only(None, "fp32", "bf16", "fp16", because="fp8 moments are Float8Tensors of the compiled extension"),
        exp_avg_sq=Only(
            None, "fp32", "bf16", "fp16", because="fp8 moments are Float8Tensors of the compiled extension"
        ),
    ),
    sharding=Only("fully_shard", because="FSDP2 shards per parameter"),
    reshard_after_forward=Anything(),
    offload=Parts(Offload, fraction=Only(0.0, 1.0, because="CPUOffloadPolicy offloads everything or nothing")),
    optimizer=Parts(
        Optimizer,
        kind=Only("sgd", "adam", "adamw"),
        impl=Only("forloop", "foreach", "fused", "multi_tensor"),
        schedule=Only("none", "halve"),
        groups=Only("model", "one"),
        clip=Anything(),
        loss_scale=Anything(),
        nesterov=Only(False, True),
        capturable=Only(False, True),
        **NUMBERS,
    ),
    microbatches=Anything(),
    grad_sync=Only("last", "every"),
    checkpoint=Formats(CHECKPOINTS),
    program=Operations(EVERY_STEP),
    options=Words(OPTIONS),
    load_options=Words({word: OPTIONS[word] for word in ("capturable", REMAINDERS)}),
    faults=Faults(),
    seed=Anything(),
    limits=LIMITS,
    features=(_QUANTISED_ON_CPU,),
    constraints=fused_adam.constraints(CONTRACT),
)


def chosen_extension(device: str) -> Mapping[str, str]:
    """Which extension ranks on a device get.

    Raises:
        UsageError: the environment asks for one that there is not.
    """
    return {"compiled extension": str(te_choice.choice(device))}
