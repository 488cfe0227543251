"""Which scenarios Megatron-Core's optimizers run: what every system over it accepts, its own checkpoint formats, and
its own Megatron-FSDP (`options=fsdp_*`)."""

from __future__ import annotations

from shardproof.loading import switches
from shardproof.mechanisms import fused_adam
from shardproof.mechanisms.fused_adam import PRECISION_AWARE
from shardproof.mechanisms.megatron import limits as megatron
from shardproof.mechanisms.megatron.limits import group_decays, has
from shardproof.mechanisms.megatron.switches import ONE_BUCKET, OVERLAP, not_exercised, several_buckets, variant
from shardproof.models import NamedParam, draws, model_spec, storage_dtype
from shardproof.program import does, load_mesh, meshes, moves
from shardproof.protocol.accepts import Accepts, Faults, Formats, LibraryError, Limit, Only, Words
from shardproof.scenario import Scenario
from shardproof.systems.megatron_core.contract import CONTRACT
from shardproof.systems.megatron_core.formats import FORMATS, LEGACY, Format
from shardproof.systems.megatron_core.switches import OPTIONS, fsdp_strategies, fsdp_strategy, under_fsdp
from shardproof.versions import before, is_version

__all__ = ["ACCEPTS", "LIMITS", "not_exercised", "variant"]


def _old_group_limits(scenario: Scenario) -> bool:
    """Whether a model has param groups that the API before 0.16 cannot express. It knows groups without weight decay
    or with the usual one, and one multiplier of the learning rate."""
    if not before(scenario.version, "0.16"):
        return False
    model = model_spec(scenario.model)
    scales = {g.lr_scale for g in model.groups} - {1.0} if scenario.optimizer.groups == "model" else set()
    return bool(group_decays(scenario, model) - {0.0, scenario.optimizer.weight_decay}) or len(scales) > 1


def _mixes_unit_gradients(scenario: Scenario) -> bool:
    """Whether several instances of the optimizer reduce gradients of two dtypes of one module."""
    if all(mesh.dp_replicate == 1 for mesh in meshes(scenario)) or scenario.dtype.reduce == "fp32":
        return False
    modules = model_spec(scenario.model).modules
    return any(len({storage_dtype(scenario.dtype, param) for param in m.params}) > 1 for m in modules)


def _format(scenario: Scenario) -> Format | None:
    return scenario.fact("checkpoint", _format_of)


def _format_of(checkpoint: str) -> Format | None:
    return FORMATS.get(checkpoint.partition("+")[0])


def _is_legacy(checkpoint: str) -> bool:
    return checkpoint.partition("+")[0] in LEGACY


def _saves(scenario: Scenario) -> bool:
    return does(scenario, "save")


def _of_other_sharding(scenario: Scenario) -> bool:
    found = _format(scenario)
    return found is not None and found.sharding != scenario.sharding


def _before_it_existed(scenario: Scenario) -> bool:
    found = _format(scenario)
    return found is not None and bool(found.since) and before(scenario.version, found.since) and _saves(scenario)


def _has_stacked(model: str) -> bool:
    """Whether sections that the library fuses have a dim of their own in the model's spec."""
    return any(named.spec.stacked for named in model_spec(model).params)


def _fsdp(scenario: Scenario) -> bool:
    return scenario.checkpoint == "fsdp_dtensor" and _saves(scenario)


def _params(scenario: Scenario) -> tuple[NamedParam, ...]:
    return model_spec(scenario.model).params


def _fsdp_reloads(scenario: Scenario) -> bool:
    """Whether the masters of Megatron-FSDP are to be taken from the model again, in a release that refuses it. With CPU
    offload another function answers."""
    later = is_version(scenario.version) and not before(scenario.version, "0.18")
    return later and under_fsdp(scenario) and not scenario.offload.fraction and does(scenario, "reload_params")


def _tp_changes(scenario: Scenario) -> bool:
    target = load_mesh(scenario)
    return target is not None and target.tp != scenario.mesh.tp


def _form(scenario: Scenario) -> str:
    return scenario.checkpoint.partition("+")[0]


def _gathers_masters(scenario: Scenario) -> bool:
    return _form(scenario) in ("dp_zero", "dp_zero_gather_scatter", "fully_reshardable")


def _wants_remainders(scenario: Scenario) -> bool:
    """Whether ranks that keep the remainders of masters load from a checkpoint of ranks that kept masters."""
    asked = switches(scenario, PRECISION_AWARE) and PRECISION_AWARE not in scenario.options
    policy = scenario.dtype
    return asked and (policy.storage, policy.master) in (("bf16", "fp32"), ("mixed", "fp32")) and does(scenario, "load")


def _other_buckets(scenario: Scenario) -> bool:
    """Whether the ranks that load close their buckets of gradients elsewhere than those that saved."""
    after = scenario.load_options
    return after is not None and several_buckets(scenario.options) != several_buckets(after) and does(scenario, "load")


def _loads_what_other_tp_wrote(scenario: Scenario) -> bool:
    """Whether a load on another tensor-parallel size needs what lies in files by tensor-parallel rank: optimizer
    state, or anything in a file of torch.save."""
    found = _format(scenario)
    if found is None or found.any_tp or not moves(scenario) or not _tp_changes(scenario):
        return False
    return does(scenario, "load") or (scenario.fact("checkpoint", _is_legacy) and does(scenario, "load_model_only"))


LIMITS: tuple[Limit, ...] = (
    *megatron.limits(CONTRACT),
    Limit(
        "fsdp-strategy",
        lambda s: under_fsdp(s) and (s.sharding != "zero1" or len(fsdp_strategies(s)) > 1),
        "Megatron-FSDP is driven with a distributed optimizer (sharding=zero1), and has one sharding strategy",
    ),
    Limit("fsdp-013", lambda s: under_fsdp(s) and before(s.version, "0.14"), "fsdp_dtensor came with 0.14"),
    Limit(
        "fsdp-device-mesh",
        lambda s: under_fsdp(s) and not before(s.version, "0.14") and before(s.version, "0.15.2"),
        "Megatron-FSDP of 0.14.0 to 0.15.1 reads a private part of DeviceMesh that torch 2.13 has no more",
        "megatron/core/distributed/fsdp/src/megatron_fsdp/utils.py, get_mesh_names",
        LibraryError(
            "AttributeError",
            "child_to_root_mapping",
            "build",
            {"version": "0.14.0", "options": "fsdp_optim_grads_params", "checkpoint": "fsdp_dtensor"},
        ),
    ),
    Limit(
        "fsdp-offload",
        lambda s: under_fsdp(s) and 0 < s.offload.fraction < 1,
        "which part of the parameters is on the host is known for DDP's buffers only",
    ),
    Limit(
        "fsdp-instances-mixed",
        lambda s: fsdp_strategy(s) == "optim_grads_params" and s.device == "cpu" and _mixes_unit_gradients(s),
        "instances of the optimizer reduce a unit's gradients of two dtypes in one call, which gloo does not take",
    ),
    Limit(
        "fsdp-gpt-units",
        lambda s: fsdp_strategy(s) == "optim_grads_params" and s.model == "gpt",
        "where parameters are sharded each module is driven as a unit, and those of the real GPTModel are whole layers",
    ),
    Limit(
        "fsdp-reload",
        _fsdp_reloads,
        "Megatron-FSDP does not take its masters from the model again, and says so since pull request 4133 (0.18)",
        "megatron/core/optimizer/distrib_optimizer.py, _copy_model_params_to_main_params",
        LibraryError(
            "NotImplementedError",
            "Megatron-FSDP does not implement a model-to-main parameter update.",
            "reload_params",
            {
                "version": "0.18.0",
                "options": "fsdp_optim_grads_params",
                "checkpoint": "fsdp_dtensor",
                "program": "build step reload_params",
            },
        ),
    ),
    Limit(
        "fsdp-precision-aware",
        lambda s: under_fsdp(s) and has("precision_aware")(s),
        "the precision-aware optimizer is driven with DDP",
    ),
    Limit(
        "generators-fsdp",
        lambda s: under_fsdp(s) and draws(s.model),
        "random generators are driven with DDP: fsdp_dtensor stores them in another form, which nobody reads here yet",
    ),
    Limit(
        "generators-device",
        lambda s: s.device != "cpu" and draws(s.model),
        "what a generator must hold is worked out with the emulated device's, whose numbers are not a GPU's",
    ),
    Limit(
        "fsdp-experts",
        lambda s: under_fsdp(s) and s.expert_parallel > 1,
        "expert parallelism is driven with DDP",
    ),
    Limit(
        "local-state",
        lambda s: has("local_state")(s) and (not under_fsdp(s) or s.optimizer.impl != "multi_tensor"),
        "local_state is a way in which FusedAdam keeps the state of Megatron-FSDP's parameters",
    ),
    Limit(
        "offload-l2",
        lambda s: s.offload.fraction > 0 and s.optimizer.kind == "adam" and not before(s.version, "0.15"),
        "offload steps with AdamW only",
        "megatron/core/optimizer/__init__.py, _get_megatron_optimizer_based_on_param_groups",
        LibraryError(
            "AssertionError",
            "CPU offloading only supported with decoupled_weight_decay",
            "build",
            {"optimizer": "adam/impl=multi_tensor", "offload": "cpu"},
        ),
    ),
    Limit(
        "l2-before-015",
        lambda s: s.optimizer.kind == "adam" and before(s.version, "0.15"),
        "releases before 0.15 have no switch for decoupled_weight_decay: Adam is always AdamW",
    ),
    Limit("groups-before-016", _old_group_limits, "groups of any weight decay or several rates came with 0.16"),
    Limit(
        "checkpoint-sharding",
        _of_other_sharding,
        "a checkpoint format serves either the distributed optimizer (sharding=zero1) or the one without "
        "(sharding=replicate: " + ", ".join(n for n, f in FORMATS.items() if f.sharding == "replicate") + ")",
    ),
    Limit(
        "stacked",
        lambda s: s.checkpoint != "fsdp_dtensor" and _saves(s) and s.fact("model", _has_stacked),
        "fused projections of equal sections are read back from fsdp_dtensor checkpoints alone: in the other formats "
        "our reader does not tell the sections apart",
    ),
    Limit(
        "fsdp-checkpoint",
        lambda s: under_fsdp(s) and s.checkpoint != "fsdp_dtensor" and _saves(s),
        "under Megatron-FSDP the only checkpoint format is fsdp_dtensor",
        "megatron/training/arguments.py, validate_args",
    ),
    Limit(
        "checkpoint-sections",
        lambda s: _fsdp(s) and _tp_changes(s) and any(p.spec.sections and p.spec.tp_dim == 0 for p in _params(s)),
        "where tensor parallelism gives each rank a share of every section, the zoo's parameter lies in the order of "
        "one such size",
    ),
    Limit(
        "checkpoint-fsdp",
        lambda s: _fsdp(s) and not before(s.version, "0.14") and not under_fsdp(s),
        "fsdp_dtensor is for Megatron FSDP, not for DistributedDataParallel",
        "megatron/core/optimizer/distrib_optimizer.py, sharded_param_state_fsdp_dtensor",
        LibraryError(
            "AssertionError",
            "fsdp_dtensor sharding type is only supported with Megatron FSDP",
            "save",
            {"checkpoint": "fsdp_dtensor"},
        ),
    ),
    Limit(
        "checkpoint-fsdp-013",
        lambda s: _fsdp(s) and before(s.version, "0.14"),
        "fsdp_dtensor came with 0.14",
        "megatron/core/optimizer/distrib_optimizer.py, sharded_state_dict",
        LibraryError(
            "NotImplementedError", "Unknown sharding_type", "save", {"version": "0.13.0", "checkpoint": "fsdp_dtensor"}
        ),
    ),
    Limit(
        "remainders-of-masters",
        lambda s: _wants_remainders(s) and _gathers_masters(s),
        "FusedAdam with store_param_remainders takes remainders alone, and other checkpoints have masters",
        "megatron/core/optimizer/distrib_optimizer.py, _set_main_param_and_optimizer_states",
        LibraryError(
            "AssertionError",
            "",
            "load",
            {"program": "restart", "load_options": PRECISION_AWARE, "dtype": "bf16/master=fp32", "mesh": "1x2x1"},
        ),
    ),
    Limit(
        "precision-aware-offloaded",
        lambda s: switches(s, PRECISION_AWARE) and s.offload.fraction > 0 and _form(s) == "dp_reshardable",
        "dp_reshardable holds what the hybrid optimizer keeps of each parameter, which differs with precision_aware",
        "megatron/core/optimizer/distrib_optimizer.py, sharded_param_state_dp_reshardable",
        LibraryError(
            "CheckpointingException",
            "found in the checkpoint",
            "load",
            {
                "program": "restart",
                "load_options": PRECISION_AWARE,
                "mesh": "1x2x1",
                "offload": "cpu",
                "checkpoint": "dp_reshardable",
            },
        ),
    ),
    Limit(
        "other-buckets-gathered",
        lambda s: _other_buckets(s) and _gathers_masters(s) and _form(s) != "fully_reshardable",
        "dp_zero formats hold each buffer with the padding of its buckets",
        "megatron/core/optimizer/distrib_optimizer.py, load_parameter_state_from_dp_zero",
        LibraryError(
            "AssertionError",
            "Number of unpadded elements must be same in current run",
            "load",
            {"program": "restart", "options": OVERLAP, "load_options": "none", "mesh": "1x2x1"},
        ),
    ),
    Limit(
        "other-buckets",
        lambda s: _other_buckets(s) and _form(s) == "dp_reshardable",
        "dp_reshardable holds a piece of each bucket",
        "megatron/core/optimizer/distrib_optimizer.py, sharded_param_state_dp_reshardable",
        LibraryError(
            "CheckpointingException",
            "Some keys found in the checkpoint are missing",
            "load",
            {
                "program": "restart",
                "options": OVERLAP,
                "load_options": "none",
                "mesh": "1x2x1",
                "checkpoint": "dp_reshardable",
            },
        ),
    ),
    Limit(
        "checkpoint-since",
        _before_it_existed,
        "dp_reshardable and fully_reshardable came with 0.15",
        "megatron/core/optimizer/distrib_optimizer.py, sharded_state_dict",
        LibraryError(
            "NotImplementedError",
            "Unknown sharding_type",
            "save",
            {"version": "0.14.0", "checkpoint": "dp_reshardable"},
        ),
    ),
    Limit(
        "checkpoint-tp-legacy",
        _loads_what_other_tp_wrote,
        "a format that follows the buffers, or has a file a tensor-parallel rank, loads at the same such size only",
        "megatron/training/checkpointing.py, load_checkpoint: (TP, PP) mismatch after resume",
    ),
)

ACCEPTS = Accepts(
    "megatron-core",
    keeps=("draws",),
    device=Only("cpu", "cuda"),
    checkpoint=Formats({name: form.switches for name, form in FORMATS.items()}),
    options=Words(OPTIONS),
    load_options=Words({word: OPTIONS[word] for word in (ONE_BUCKET, OVERLAP, PRECISION_AWARE)}),
    faults=Faults(),
    limits=LIMITS,
    constraints=(*fused_adam.constraints(CONTRACT), *megatron.constraints(CONTRACT)),
    features=(),
    **megatron.AXES,
)
