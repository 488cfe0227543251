"""Contracts: what a system promises where the answer is a choice, as data with its source.

The twin and the grid take the dtype of every stage from here. A system is checked against it: a system
that stores, computes or reduces in another dtype than its contract is a mismatch, not a variant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness.models import ModuleSpec, ParamSpec, model_spec, storage_dtype
from harness.oracle import pretrained
from harness.probe import Grid, choose_grid
from harness.program import Op
from harness.scenario import FLOAT_DTYPES, DTypePolicy, Mesh, Optimizer, Scenario


@dataclass(frozen=True)
class Stages:
    """The dtype of each stage a parameter's value and gradient pass through.

    storage: the model's parameter. compute: inside the forward, and of the gradient that comes out of it.
    accumulate: sum over microbatches. reduce: sum over ranks. main_grad: as the optimizer sees it.
    master: separate master parameter (None: the optimizer steps on `storage`). exp_avg, exp_avg_sq: Adam's moments.
    """

    storage: str
    compute: str
    accumulate: str
    reduce: str
    main_grad: str
    master: str | None
    exp_avg: str
    exp_avg_sq: str

    @property
    def stepped(self) -> str:
        """The dtype of what the optimizer steps on, and of SGD's momentum."""
        return self.master or self.storage

    def moment(self, role: str) -> str:
        """The dtype that optimizer state of a role (`exp_avg`, `exp_avg_sq`, `momentum`) is stored in."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}.get(role, self.stepped)


@dataclass(frozen=True)
class Contract:
    """One promise: what it says and where that is written."""

    promise: str
    source: str


FSDP2 = (
    Contract(
        "parameters compute in param_dtype, else in their storage dtype",
        "torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    Contract(
        "gradients accumulate and reduce in reduce_dtype, else in the compute dtype",
        "torch FSDPParam.to_accumulated_grad_if_needed",
    ),
    Contract(
        "the sharded gradient is cast to the storage dtype before the optimizer",
        "torch foreach_reduce, orig_dtype",
    ),
    Contract(
        "optimizer state has the dtype of the tensor it steps on",
        "torch.optim.adam._init_group, zeros_like",
    ),
    Contract(
        "dim 0 is sharded in torch.chunk order, inside the tp shard",
        "torch FSDPParam._init_sharded_param, _StridedShard",
    ),
)

ZERO1 = (
    Contract(
        "gradient buffers hold the reduce dtype, else the storage dtype; accumulation happens in the buffer",
        "Megatron DistributedDataParallel, grad_reduce_in_fp32",
    ),
    Contract(
        "with masters, main gradient, master and moments have their dtype; the model parameter is the rounded master",
        "Megatron DistributedOptimizer",
    ),
    Contract(
        "a buffer is a flat concatenation of a dtype's parameters in reverse order, padded so that each rank owns an "
        "equal range of each bucket",
        "Megatron _ParamAndGradBuffer",
    ),
)


MEGATRON = (
    Contract(
        "the dynamic loss scale exists in fp16 only; it doubles after 2 steps without overflow, halves from the second "
        "overflow on that no growth came between (hysteresis), and is at least 1",
        "megatron.core.optimizer.grad_scaler.DynamicGradScaler",
    ),
    Contract(
        "gradients are multiplied in fp32 by clip / (norm + 1e-6), a python float, if that is below 1",
        "megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32",
    ),
    Contract(
        "every trainable parameter has a gradient, zeros where no forward used it; frozen ones the optimizer lacks",
        "megatron.core.distributed.param_and_grad_buffer, main_grad; optimizer._get_param_groups",
    ),
    Contract(
        "floating-point buffers are cast with the model to the half dtype",
        "megatron.core.transformer.module.Float16Module",
    ),
    Contract(
        "the optimizer reads the gradient in fp32; a precision-aware one reads it in the buffer's dtype",
        "megatron.core.optimizer.distrib_optimizer._copy_model_grads_to_main_grads",
    ),
    Contract(
        "a bf16 parameter is its fp32 master rounded half away from zero where the optimizer keeps the lower 16 bits "
        "of the master as a signed remainder",
        "TransformerEngine FusedAdam, store_param_remainders",
    ),
    Contract(
        "a master in fp16 and moments in fp16 or fp8 are divided by a scale: the largest magnitude of the rank's shard "
        "of the parameter over 32752 or 448; a checkpoint holds their product in fp32, and a load takes new scales",
        "TransformerEngine FusedAdam, _apply_scale, get_unscaled_state, set_scaled_state",
    ),
    Contract(
        "with CPU offload, elements on the host are stepped by torch.optim.AdamW(fused=True), those on the device by "
        "FusedAdam, or by torch's too where use_torch_optimizer_for_cpu_offload asks for it or there is no FusedAdam",
        "megatron.core.optimizer, optimizer_cpu_offload",
    ),
)

BRIDGE = (
    Contract(
        "loading a pretrained checkpoint refreshes the optimizer's masters from the loaded parameters",
        "megatron.bridge.training.checkpointing._load_checkpoint_from_path, cfg.checkpoint.finetune",
    ),
)

TRANSFORMER_ENGINE = (
    Contract(
        "with master_weights a half-precision parameter has a master in the optimizer's state, made of it by the first "
        "step; an fp32 parameter is its own",
        "TransformerEngine FusedAdam, master_weights",
    ),
    Contract(
        "moments are fp32 unless asked otherwise; a state dict holds them, and masters, in fp32, remainders as int16",
        "TransformerEngine FusedAdam.state_dict",
    ),
    Contract(
        "a bf16 parameter is its fp32 master rounded half away from zero under store_param_remainders",
        "TransformerEngine FusedAdam, store_param_remainders",
    ),
    Contract(
        "an fp16 master or moment is divided by a scale, the largest magnitude of the rank's shard over 32752; a load "
        "takes new scales, and leaves the state dict that it is given as it was",
        "TransformerEngine FusedAdam, _apply_scale, load_state_dict",
    ),
    Contract(
        "a quantised matrix is its fp32 master times a scale, in fp8e4m3, saturating: 448 over the master's largest "
        "magnitude on all shards (current scaling), or the scale that the recipe's state has (delayed: 1 without an "
        "autocast); a checkpoint stores its bytes and the scale's inverse, and a load gives back both",
        "TransformerEngine Float8CurrentScaling, DelayedScaling, Float8Tensor.__reduce_ex__ (2.16.0 on)",
    ),
    Contract(
        "a tensor-parallel layer's parameters are sharded over the mesh that it was given: what a checkpoint stores "
        "under a name is the whole tensor, and loads on any other mesh",
        "NVIDIA/TransformerEngine pull request 2713",
    ),
)

MEGATRON_FSDP = (
    Contract(
        "a unit's parameters of one dtype lie in a flat buffer, widest rows first, that is cut into equal ranges at "
        "whole rows of every parameter: dim 0 is sharded unevenly, and a parameter may lie on one rank alone",
        "megatron_fsdp.param_and_grad_buffer, build_data_parallel_buffer_index",
    ),
    Contract(
        "the optimizer steps on main parameters of main_params_dtype, fp32 unless asked otherwise; the model's are "
        "their rounded values",
        "megatron_fsdp.MixedPrecisionPolicy.main_params_dtype",
    ),
    Contract(
        "gradients accumulate and reduce in main_grads_dtype, else in the parameter's own dtype; the optimizer reads "
        "them in the dtype of what it steps on",
        "megatron_fsdp.MixedPrecisionPolicy.main_grads_dtype",
    ),
    Contract(
        "where gradients are decoupled, FusedAdam reads them in the dtype they were reduced in; a precision-aware one "
        "steps the model's parameters and keeps their masters in its state: no main parameters",
        "megatron_fsdp README, use_decoupled_grad; TransformerEngine FusedAdam, use_decoupled_grad, master_weights",
    ),
    Contract(
        "sharding leaves no trace: an optimizer that was sharded has taken no step and moved no parameter",
        "NVIDIA/Megatron-LM pull request 5976",
    ),
    Contract(
        "a checkpoint's model section holds the main parameters",
        "megatron_fsdp.MegatronFSDP, state_dict",
    ),
)


SCALED = ("fp16", "fp8e4m3")
"""Dtypes in which FusedAdam keeps a state divided by a scale (transformer_engine FusedAdam, dtype_to_range_map)."""

DECOUPLED = "decoupled_grad"
"""The switch of systems whose FusedAdam reads the gradient as it was reduced, whatever it steps on."""
PRECISION_AWARE = "precision_aware"
REMAINDERS = "remainders"
TORCH_OFFLOAD = "torch_offload"
NEW_DECAY = "new_decay"
NO_EXTRA_STATE = "no_extra_state"
FP8_CURRENT, FP8_DELAYED = "fp8_current", "fp8_delayed"
QUANTISED = (FP8_CURRENT, FP8_DELAYED)
"""Switches under which matrices are stored in fp8e4m3, one scale for each."""
FP8_BOUND = 0.4375
"""Largest magnitude of their initial values, fp8e4m3's 448 times a power of two: a cast leaves them as they are."""
TWIN_OPTIONS = (DECOUPLED, NEW_DECAY, PRECISION_AWARE, REMAINDERS, TORCH_OFFLOAD, *QUANTISED)
"""Switches that the oracle knows."""
LINEAR_STEPS = 8
"""Steps after which a linear schedule has reached a learning rate of 0."""


@dataclass(frozen=True)
class Rules:
    """What a training loop around the optimizer does, where systems differ.

    loss_scale: `torch` (torch.amp.GradScaler) or `megatron` (DynamicGradScaler, and only where something is stored in
    fp16). clip: `torch` (torch.nn.utils.clip_grad_norm_) or `megatron`. norm_dtype: of the reported total norm.
    zero_gradients: a trainable parameter that no forward uses has a gradient of zeros. trainable_only: the optimizer
    holds trainable parameters only. half_buffers: floating-point buffers are cast to the half dtype of the storage.
    owner_groups: hyperparameters are recorded parameter by parameter. host_kernel: what is offloaded to the host is
    stepped by torch.optim, whatever steps the rest. same_decay: every build asks for the same weight decay unless the
    scenario has the option `new_decay`: that the load does not restore it is one defect, which would hide others.
    load_refreshes: loading the model alone also refreshes the masters from it, without a reload_params. pretrained: a
    build loads its parameters from a checkpoint file, in dtypes that `oracle.pretrained` knows.
    sharded_masters: there are separate masters under every sharding, per-parameter sharding too. masters_in_model: the
    model's part of a checkpoint holds the masters, so that loading it alone restores them: nothing is left to refresh;
    or, where it is text, it does so under options that begin with it.
    lazy_masters: masters are a part of the optimizer's state, made of the parameter by its first step.
    storage_gradients: the optimizer reads gradients in the storage dtype, whatever it steps on. last_lr: the schedule
    keeps the learning rate of every group that it set last, as torch's do.
    """

    loss_scale: str = "torch"
    clip: str = "torch"
    norm_dtype: str = "fp32"
    zero_gradients: bool = False
    trainable_only: bool = False
    half_buffers: bool = False
    owner_groups: bool = False
    host_kernel: bool = False
    same_decay: bool = False
    load_refreshes: bool = False
    pretrained: bool = False
    sharded_masters: bool = False
    masters_in_model: bool | str = False
    lazy_masters: bool = False
    storage_gradients: bool = False
    last_lr: bool = True


_MEGATRON_RULES = Rules(
    loss_scale="megatron",
    clip="megatron",
    norm_dtype="fp64",
    zero_gradients=True,
    trainable_only=True,
    half_buffers=True,
    owner_groups=True,
    host_kernel=True,
    same_decay=True,
    masters_in_model="fsdp_",
    last_lr=False,
)

_MEGATRON_FSDP_RULES = Rules(
    zero_gradients=True, trainable_only=True, owner_groups=True, sharded_masters=True, masters_in_model=True
)

_RULES = {
    "megatron-core": _MEGATRON_RULES,
    "megatron-bridge": replace(_MEGATRON_RULES, load_refreshes=True),
    "automodel": Rules(trainable_only=True, pretrained=True),
    "megatron-fsdp": _MEGATRON_FSDP_RULES,
    "transformer-engine": Rules(sharded_masters=True, lazy_masters=True, storage_gradients=True),
}


def rules(system: str) -> Rules:
    """The rules of a system; torch's for every system without its own."""
    return _RULES.get(system, Rules())


def declare(system: str, own: Rules) -> None:
    """Give a plugin's system rules of its own."""
    _RULES[system] = own


def at_build(scenario: Scenario, init_seed: int) -> Optimizer:
    """The hyperparameters that a build starts with: others at every later build, so that a load that does not restore
    them is seen."""
    asked = scenario.optimizer.at_build(init_seed)
    if rules(scenario.system).same_decay and NEW_DECAY not in scenario.options:
        return replace(asked, weight_decay=scenario.optimizer.weight_decay)
    return asked


def on_mesh(scenario: Scenario, mesh: Mesh) -> Scenario:
    """The scenario as a session on a mesh sees it: what a pretrained model's tensors are depends on whether they are
    sharded there, and a program may move between one rank and several."""
    return replace(scenario, mesh=mesh) if rules(scenario.system).pretrained else scenario


def stages(scenario: Scenario, spec: ParamSpec) -> Stages:
    """The dtype contract of one parameter under a scenario's sharding and dtype policy."""
    policy = scenario.dtype
    if rules(scenario.system).pretrained:
        found = pretrained.parameter(scenario, spec)
        moments = (found.state, found.state)
        return Stages(found.storage, found.compute, found.reduce, found.reduce, found.storage, None, *moments)
    storage = storage_dtype(policy, spec)
    compute = policy.param or storage
    reduce = policy.reduce or compute
    master = _master(scenario, storage)
    stepped = master or storage
    precise = PRECISION_AWARE in scenario.options
    main_grad = (policy.grad or reduce) if precise or DECOUPLED in scenario.options else stepped
    if rules(scenario.system).storage_gradients:
        main_grad = storage
    fused = rules(scenario.system).lazy_masters and scenario.optimizer.impl == "multi_tensor"
    moment = "fp32" if precise or fused else stepped
    return Stages(
        storage, compute, reduce, reduce, main_grad, master, policy.exp_avg or moment, policy.exp_avg_sq or moment
    )


def stepped_dtype(scenario: Scenario, spec: ParamSpec) -> str:
    """The dtype of the tensor that the optimizer steps on."""
    storage = storage_dtype(scenario.dtype, spec)
    return _master(scenario, storage) or storage


def _master(scenario: Scenario, storage: str) -> str | None:
    master = scenario.dtype.master
    if scaled_master(scenario):
        return master if storage != "fp32" else None
    return master if master and master != storage else None


def scaled_master(scenario: Scenario) -> bool:
    """Whether FusedAdam keeps masters in fp16 beside their parameters, scaled, and calculates with them in fp32."""
    beside = PRECISION_AWARE in scenario.options or rules(scenario.system).lazy_masters
    return scenario.dtype.master == "fp16" and beside


def scaled_roles(scenario: Scenario, stage: Stages) -> tuple[str, ...]:
    """Which of a parameter's master and moments FusedAdam keeps as multiples of a scale of their own."""
    if not masters_in_state(scenario):
        return ()
    kept = {"master": stage.master, "exp_avg": stage.exp_avg, "exp_avg_sq": stage.exp_avg_sq}
    return tuple(role for role, dtype in kept.items() if dtype in SCALED)


def has_scales(scenario: Scenario) -> bool:
    """Whether some state is scaled, so that its bits depend on which elements lie together (see `domains`)."""
    if scenario.optimizer.kind == "sgd":
        return False
    params = model_spec(scenario.model).unique_params
    return any(scaled_roles(scenario, stages(scenario, p.spec)) for p in params if p.spec.trainable == "yes")


def half_dtype(policy: DTypePolicy) -> str | None:
    """The half-precision dtype that a policy stores the bulk of a model in; None for fp32."""
    return {"bf16": "bf16", "fp16": "fp16", "mixed": "bf16", "mixed_fp16": "fp16"}.get(policy.storage)


def initial_dtypes(scenario: Scenario, spec: ParamSpec) -> tuple[str, ...]:
    """The dtypes that a parameter's initial value passes through, the last of them the one it is stored in."""
    storage = stages(scenario, spec).storage
    if is_quantised(scenario, spec):
        return "fp8e4m3", storage
    return (pretrained.file_dtype(scenario, spec), storage) if rules(scenario.system).pretrained else (storage,)


def initial_bound(scenario: Scenario, spec: ParamSpec) -> float:
    """The largest magnitude of a parameter's initial values; what is beyond it is clipped before the first dtype."""
    return FP8_BOUND if is_quantised(scenario, spec) else math.inf


def is_quantised(scenario: Scenario, spec: ParamSpec) -> bool:
    """Whether a parameter is stored in fp8e4m3, beside one scale, and its storage dtype is what it is read as."""
    return len(spec.shape) == 2 and any(option in scenario.options for option in QUANTISED)


def buffer_dtype(scenario: Scenario, dtype: str, module: ModuleSpec | None = None) -> str:
    """The dtype of a buffer that its module declares as `dtype`."""
    if module and dtype in FLOAT_DTYPES and rules(scenario.system).pretrained:
        return pretrained.buffer(scenario, dtype, module)
    half = half_dtype(scenario.dtype)
    return half if half and rules(scenario.system).half_buffers and dtype in FLOAT_DTYPES else dtype


def has_scaler(scenario: Scenario) -> bool:
    """Whether training runs under a dynamic loss scale."""
    if rules(scenario.system).loss_scale == "megatron" and half_dtype(scenario.dtype) != "fp16":
        return False
    return scenario.optimizer.loss_scale > 0


def gradient_ranks(scenario: Scenario, spec: ParamSpec, dp: int) -> int:
    """Number of distinct contributions to a parameter's gradient among `dp` data-parallel ranks: the ranks that share
    the experts out have one between them."""
    return dp // scenario.expert_parallel if spec.ep_dim is not None else dp


def gradient_grid(scenario: Scenario, spec: ParamSpec, dp: int) -> Grid:
    """The exact grid that a parameter's gradients are drawn from under `dp` data-parallel ranks."""
    stage = stages(scenario, spec)
    return choose_grid(
        (stage.accumulate, stage.reduce, stage.main_grad),
        stage.compute,
        gradient_ranks(scenario, spec, dp),
        scenario.microbatches,
    )


def linear_share(steps: int) -> float:
    """The share of the learning rate that a linear schedule leaves after so many steps."""
    return max(0.0, 1.0 - steps / LINEAR_STEPS)


def steps_on_gpu(scenario: Scenario) -> bool:
    """Whether a kernel of a real GPU steps some element. Its bits are the twin's to say, on the same GPU: the
    reference's numpy has no such kernels. What is offloaded is stepped by torch's for the CPU, everywhere the same."""
    return scenario.device == "cuda" and scenario.offload.fraction < 1


def twin_device(scenario: Scenario) -> str:
    """Where the twin holds its tensors: on the host as soon as offload leaves the host some, else on the device."""
    return "cpu" if scenario.offload.fraction else scenario.device


def masters_in_state(scenario: Scenario) -> bool:
    """Whether masters are a part of the optimizer's state, made of the parameter by its first step."""
    if rules(scenario.system).lazy_masters:
        return True
    return PRECISION_AWARE in scenario.options and not scenario.offload.fraction


def masters_in_model(scenario: Scenario) -> bool:
    """Whether a checkpoint's model section holds the masters, so that loading it alone restores them (see `Rules`)."""
    rule = rules(scenario.system).masters_in_model
    if masters_in_state(scenario):
        return False
    return any(option.startswith(rule) for option in scenario.options) if isinstance(rule, str) else rule


def has_masters(scenario: Scenario, op: Op) -> bool:
    """Whether masters have a definite value after an operation. Those in the optimizer's state have none between a load
    of the model alone and the refresh that follows it: they may be kept as what the parameter lacks to them."""
    stale = op.kind == "load_model_only" and not rules(scenario.system).load_refreshes
    return not (masters_in_state(scenario) and stale)


def rounds_half_away(scenario: Scenario, stage: Stages) -> bool:
    """Whether a parameter is what remains of its master above a signed 16-bit remainder, not its nearest-even value."""
    asked = {PRECISION_AWARE, REMAINDERS} & set(scenario.options)
    return bool(asked) and masters_in_state(scenario) and (stage.storage, stage.master) == ("bf16", "fp32")


def kernels(scenario: Scenario) -> tuple[str, str]:
    """The implementations that step what is on the device and what is on the host (see `scenario.Optimizer.impl`)."""
    impl = scenario.optimizer.impl
    if not scenario.offload.fraction or not rules(scenario.system).host_kernel:
        return impl, impl
    if scenario.optimizer.kind == "sgd":
        return "forloop", "forloop"
    host = "fused"
    device = impl if impl == "multi_tensor" and TORCH_OFFLOAD not in scenario.options else host
    return (host if scenario.offload.fraction == 1 else device), host
