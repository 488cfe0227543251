"""A failure of Megatron-Core's optimizers as a script: DDP or FSDP, the optimizer, and the checkpoint calls of the
training script. Values for the template `megatron.py.j2`. No torch.

A script asks for `cuda`. On a machine without a GPU the module `gpu_on_cpu.py` beside it gives the CPU that name, and
has a plain FusedAdam where a scenario steps with one. Without it Megatron-Core takes torch.optim's, as it does wherever
neither TransformerEngine nor apex is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardproof.export.case import KEPT, OTHER, RAISES, TRAINED, TYPED, WRITTEN, FailureCase, NoExportError, case_of
from shardproof.export.model import TORCH_NAME, model_values
from shardproof.export.script import Draft
from shardproof.mechanisms.megatron import export_calls as calls_of
from shardproof.mechanisms.megatron import export_groups as groups
from shardproof.mechanisms.megatron.export_calls import Store
from shardproof.mechanisms.megatron.switches import GPT_MODEL
from shardproof.mechanisms.stand_ins import MODULE, gpu_on_cpu
from shardproof.observe.record import LIVE
from shardproof.oracle.contract import half_dtype

STATE_KEYS = {"momentum": "momentum_buffer"}


HOME = "shardproof.mechanisms.megatron"
INNER = "optimizer.chained_optimizers[0]"


@dataclass(frozen=True)
class _Form:
    """What of the template a script takes. lean: one parameter, and its master on the host. fused_linear: one fused
    layer, its path and sizes; empty for none. idle: moments of a parameter that no forward uses. With none of these it
    has all parameters that the case needs."""

    lean: bool
    fused_linear: Mapping[str, Any]
    idle: bool

    @property
    def alone(self) -> bool:
        """Whether a script on one rank is enough to show the failure."""
        return self.lean or bool(self.fused_linear) or self.idle


def draft_script(case: FailureCase, store: Store, *, local_state: bool = False) -> Draft:
    """The draft of a case.

    Args:
        local_state: FusedAdam keeps the state of DTensors as plain local tensors.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    case = _stepped(_copies(case))
    case.require_comparable()
    form = _Form(_is_lean(case, store), _fused_linear(case, store), _is_idle(case))
    case = case.on_one_rank() if form.alone else case
    _require(case, store)
    return Draft(
        HOME,
        "megatron.py.j2",
        _calls(case, store, form),
        _value(form),
        _values(case, store, form),
        f"{case.scenario.system} {case.result.version}",
        _shims(case, store, local_state=local_state),
        case=case,
    )


def _values(case: FailureCase, store: Store, form: _Form) -> dict[str, Any]:
    """What the template needs to know: of the model, of what is compared, and of the checkpoint's format."""
    nested = any("." in m.path for m in case.spec.modules)
    model = model_values(case, nested=nested)
    return {
        **model,
        **_model_class(case, store, model, nested=nested),
        **_compared(case),
        "form": store.form,
        "metadata": store.metadata,
        "written_name": model["fqn"],
        "config": calls_of.call(
            "TransformerConfig", calls_of.config(half_dtype(case.scenario.dtype), _cut(case, store))
        ),
        "wrapped": bool(store.fsdp and half_dtype(case.scenario.dtype)) or bool(form.fused_linear),
        "shim": MODULE,
        "lean": form.lean,
        "fused_linear": form.fused_linear,
        "shape": repr(case.spec.param(case.focus.fqn).spec.shape) if form.lean else "",
    }


def _model_class(case: FailureCase, store: Store, model: Mapping[str, Any], *, nested: bool) -> dict[str, Any]:
    """Of the model's class: its shapes, and whether a table of blocks says all of it."""
    nets = _delta_nets(case, _cut(case, store))
    one_class = not (store.fsdp or nets or "overlap_param_gather" in case.scenario.options)
    return {
        "shapes": _fused(case, model, _cut(case, store)),
        "stepping": case.does("step", "overflow"),
        "nested": nested,
        "by_block": one_class and _whole_islands(model),
        "expert_blocks": _expert_blocks(case),
        "delta_nets": nets,
        "cuts": {name: dim for name, dim in model["tp"].items() if _cut(case, store) > 1},
        "fp32_blocks": list(dict.fromkeys(name.rpartition(".")[0] for name in model["islands"])),
    }


def _compared(case: FailureCase) -> dict[str, Any]:
    """Where a master or a moment lies, for the functions that read one."""
    precise, offload = calls_of.is_precise(case.scenario), case.scenario.offload.fraction > 0
    return {
        "offload": offload,
        "precise": precise,
        "remainder": precise and half_dtype(case.scenario.dtype) == "bf16" and not offload,
        "gathers": _gathers(case),
        "inner": INNER,
        "state_key": STATE_KEYS.get(case.focus.role, case.focus.role),
    }


def _calls(case: FailureCase, store: Store, form: _Form) -> dict[str, str]:
    """The library's calls, by kind of operation."""
    half = half_dtype(case.scenario.dtype)
    calls = {
        "start": "\n".join(calls_of.joined(case)),
        "build": "\n".join(calls_of.build(case, store, half)),
        "step": "\n".join(calls_of.step(case)),
        "reload_params": "optimizer.reload_model_params()",
        **calls_of.checkpoint(store, case),
    }
    if form.idle:
        calls["expected"] = f"torch.zeros({case.spec.param(case.focus.fqn).spec.numel})"
    if groups.scheduled(case):
        calls["state"] = groups.STATE
    if form.fused_linear:
        calls |= _fused_calls(case, store, half, form.fused_linear["columns"])
    return calls | (_lean_calls(case, half) if form.lean else {})


def _lean_calls(case: FailureCase, half: str | None) -> dict[str, str]:
    """Of a script of one parameter: its weight goes through a file by itself."""
    return {
        "expected": f"model.module.{_own(case)}.detach().flatten().float().cpu()",
        "build": "\n".join(_lean_build(case, half)),
        "save": "torch.save(model.state_dict(), CHECKPOINT)",
        "load_model_only": "model.load_state_dict(torch.load(CHECKPOINT))",
    }


def _value(form: _Form) -> str:
    """The expression of what is compared."""
    if form.lean:
        return f"next(iter({INNER}.optimizer.param_to_inner_param.values())).detach().flatten().cpu()"
    return "read(model, optimizer)"


def _shims(case: FailureCase, store: Store, *, local_state: bool) -> Mapping[str, str]:
    """What stands in for a GPU, as far as the case needs it."""
    scenario, precise = case.scenario, calls_of.is_precise(case.scenario)
    return gpu_on_cpu(
        fused=scenario.optimizer.impl == "multi_tensor" and scenario.optimizer.kind != "sgd",
        local_state=local_state,
        precise=precise,
        offload=precise and scenario.offload.fraction > 0,
        random=bool(store.fsdp) and case.ops[-1].mesh.tp > 1,
        triton=calls_of.imports_triton(case.result.version),
    )


def _copies(case: FailureCase) -> FailureCase:
    """Copies of one parameter that differ, as what a script compares: a master on the host with the weight that was
    loaded, or what a file has with the parameter."""
    first = case.first
    if first is None or (first.key.role, first.kind) != ("param", "replica_conflict"):
        return case
    live = first.key.where == LIVE
    at = next(op for op in case.ops if op.index == first.key.op)
    if at.kind not in ("save", "reload_params") or (case.focus.kind != OTHER and case.focus.op.index == at.index):
        return case
    shown = replace(first, key=first.key._replace(role="master" if live else "param"), kind="bits")
    case = replace(case, focus=replace(case.focus, kind=KEPT if live else WRITTEN, difference=shown)).until(at.kind)
    return case.only(tuple(op for op in case.ops if op.kind != "step")) if case.weights_alone else case


def _stepped(case: FailureCase) -> FailureCase:
    """With the steps, and on one rank, where masters are inside FusedAdam: it has none before its first step."""
    scenario = case.scenario
    inside = case.focus.role == "master" and case.ops[-1].mesh.world > 1
    if not (calls_of.is_precise(scenario) and case.weights_alone and (inside or scenario.offload.fraction)):
        return case
    whole = case_of(case.result, whole=True)
    return whole.on_one_rank() if inside and not scenario.offload.fraction else whole


def _is_lean(case: FailureCase, store: Store) -> bool:
    """Whether a script of one parameter shows it: a master on the host that must be its weight, which was loaded."""
    offloaded = case.focus.role == "master" and case.scenario.offload.fraction > 0
    return case.weights_alone and offloaded and store.form in ("dp_zero", "plain", "weights")


def _fused_linear(case: FailureCase, store: Store) -> dict[str, Any]:
    """The one fused layer that a script needs where splitting its state raises: path, and sizes of `nn.Linear`."""
    named = next((p for p in case.spec.params if any(name == "_w" for name, _ in p.spec.sections)), None)
    splits = case.focus.kind == RAISES and case.focus.op.kind == "save" and not case.whole
    if not (store.fsdp and splits and named) or len(named.spec.shape) != 2 + named.spec.stacked:
        return {}
    shape = _fused(case, {"shapes": {"": {named.spec.name: named.spec.shape}}})[""][named.spec.name]
    path = named.fqn.rpartition(".")[0]
    nested = "fc1"
    for part in reversed(path.split(".")):
        nested = f"nn.ModuleList([{nested}])" if part.isdigit() else f'nn.ModuleDict({{"{part}": {nested}}})'
    return {
        "outer": path.partition(".")[0],
        "nested": nested.partition(": ")[2].removesuffix("})"),
        "path": path,
        "rows": shape[0],
        "columns": shape[1],
    }


def _fused_calls(case: FailureCase, store: Store, half: str | None, columns: int) -> dict[str, str]:
    """Build, step and save of a script with one fused layer."""
    values = {"lr": repr(case.scenario.optimizer.lr)}
    values |= {name: value for name, value in calls_of.optimizer(case.scenario, half).items() if name not in _PLAIN}
    model, dtype = ("Float16Module(CONFIG, Model())", f", dtype={TORCH_NAME[half]}") if half else ("Model()", "")
    names = 'state["model"], state["optimizer"]'
    build = [
        "ddp_config = DistributedDataParallelConfig(",
        f'    use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy="{store.fsdp}"',
        ")",
        f"model = FullyShardedDataParallel(CONFIG, ddp_config, {model}, fsdp_unit_modules=[nn.Linear])",
        *calls_of.spread("config", "OptimizerConfig", values),
        "optimizer = get_megatron_optimizer(config, [model])",
    ]
    step = [
        f'model(torch.ones({columns}, device="cuda"{dtype})).sum().backward()',
        "finalize_model_grads([model])",
        "optimizer.step()",
    ]
    save = [
        'state = {"model": model.module.state_dict_for_save_checkpoint()}',
        'metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}',
        'state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)',
        f"{names} = handle_swiglu_in_state_dict(model.module, {names})",
        "preprocess_state_dict_for_uneven_dtensor(state)",
        'dcp.save(state, checkpoint_id=__file__ + ".checkpoint")',
    ]
    return {"build": "\n".join(build), "step": "\n".join(step), "save": "\n".join(save)}


def _own(case: FailureCase) -> str:
    return case.focus.fqn.rpartition(".")[2]


def _lean_build(case: FailureCase, half: str | None) -> list[str]:
    scenario = case.scenario
    values = {"lr": repr(scenario.optimizer.lr)}
    values |= {name: value for name, value in calls_of.optimizer(scenario, half).items() if name not in _PLAIN}
    return [
        "torch.manual_seed($number)",
        "model = Model()",
        "model = DistributedDataParallel("
        "model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)",
        *calls_of.spread("config", "OptimizerConfig", values),
        "optimizer = get_megatron_optimizer(config, [model])",
    ]


_PLAIN = ("optimizer", "weight_decay", "clip_grad", "decoupled_weight_decay")
"""Options that do not matter where no step is taken."""


def _require(case: FailureCase, store: Store) -> None:
    scenario, ask, role = case.scenario, case.scenario.optimizer, case.focus.role
    sharded = {"master", "exp_avg", "exp_avg_sq", "momentum", "step"}
    compared = case.focus.kind in (KEPT, WRITTEN, TRAINED)
    wanted = {
        "a GPTModel": scenario.model == GPT_MODEL,
        "expert parallelism in a comparison": scenario.expert_parallel > 1 and case.focus.kind != RAISES,
        "parameters cut by tensor parallelism": any(op.mesh.tp > 1 for op in case.ops)
        and not _cuts_nothing(case)
        and _cut(case, store) == 1,
        "tied parameters": scenario.model == "tied",
        "a schedule in other formats than dp_zero": groups.scheduled(case) and store.form != "dp_zero",
        "param groups of their own but for their settings": groups.own_groups(case) and not case.focus.setting,
        "param groups of their own before 0.16": groups.own_groups(case) and not _knows_overrides(case),
        "overflowing steps": case.does("overflow"),
        "comparisons of steps": case.focus.kind == TRAINED and not _is_idle(case),
        "moments and files of the offloading precision-aware optimizer": calls_of.is_precise(scenario)
        and scenario.offload.fraction > 0
        and compared
        and not (case.focus.kind == KEPT and (role in ("param", "step") or store.form.startswith("dp_zero"))),
        "comparisons of dtypes": case.focus.kind == TYPED,
        "comparisons of checkpoints without a distributed optimizer": compared
        and scenario.sharding != "zero1"
        and not _is_lean(case, store),
        "parameters of several dtypes under Megatron-FSDP": bool(store.fsdp)
        and scenario.dtype.storage.startswith("mixed"),
        "comparisons under Megatron-FSDP": compared and bool(store.fsdp),
        "comparisons on several ranks": compared
        and role in sharded
        and case.ops[-1].mesh.world > 1
        and not _gathers(case),
        "another number of ranks for the load": len(case.parts) > 1,
        "FusedSGD in a comparison": ask.kind == "sgd" and ask.impl == "multi_tensor" and compared,
    }
    NoExportError.unless_all_done(case.result, "Megatron-Core", wanted)


def _expert_blocks(case: FailureCase) -> list[str]:
    """Blocks whose parameters expert parallelism shares out."""
    found = [m.path for m in case.spec.modules if any(p.ep_dim is not None for p in m.params)]
    return found if case.scenario.expert_parallel > 1 else []


def _delta_nets(case: FailureCase, share: int) -> dict[str, str]:
    """Path of a gated delta net → the line in which it says the sizes of its fused projection, by which the library
    knows it."""
    found = {}
    for named in case.spec.params:
        sizes = dict(named.spec.sections)
        if {".query", ".value", ".beta"} <= sizes.keys():
            told = f"{sizes['.query']}, {sizes['.value']}, {sizes['.beta']}, {sum(sizes.values())}"
            net = named.fqn.rpartition(".")[0].rpartition(".")[0]
            found[net] = f"net.qk_dim, net.v_dim, net.num_value_heads, net.in_proj_dim = {told}"
            found[net] += f"\n        net.tp_size = {share}" if share > 1 else ""
    return found


def _cuts_nothing(case: FailureCase) -> bool:
    """Whether tensor parallelism has to cut no parameter for it, since the model cannot even be built."""
    return case.focus.kind == RAISES and case.focus.op.kind == "build"


def _cut(case: FailureCase, store: Store) -> int:
    """Of how many ranks' parts a parameter of the script is one, by tensor parallelism. Nothing of them is compared
    then."""
    cuts = case.focus.kind == RAISES and bool(store.fsdp) and not _cuts_nothing(case)
    return case.ops[-1].mesh.tp if cuts and not any(p.spec.stacked for p in case.spec.params) else 1


def _knows_overrides(case: FailureCase) -> bool:
    """Whether the release is told of groups by overrides, as from 0.16 on."""
    return tuple(map(int, case.result.version.split(".")[:2])) >= (0, 16)


def _is_idle(case: FailureCase) -> bool:
    """Whether it is about moments of a parameter that no forward uses: they are zero after any step."""
    focus = case.focus
    return (
        focus.kind == TRAINED and focus.role in ("exp_avg", "exp_avg_sq") and not case.spec.param(focus.fqn).spec.used
    )


def _gathers(case: FailureCase) -> bool:
    """Whether a script puts a value together of the shards that several ranks have: masters that are offloaded."""
    return case.focus.role == "master" and case.ops[-1].mesh.world > 1 and case.scenario.offload.fraction > 0


def _fused(case: FailureCase, model: Mapping[str, Any], cut: int = 1) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes as the library has them: what is fused of equal sections has no dim for them, and of experts there are
    those of one rank."""
    stacked = {p.spec.name for p in case.spec.params if p.spec.stacked}
    experts = {p.spec.name: p.spec.ep_dim for p in case.spec.params if p.spec.ep_dim is not None}
    share = case.scenario.expert_parallel

    def of_rank(block: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        parts = {experts.get(name): share} | ({model["tp"].get(f"{block}.{name}"): cut} if cut > 1 else {})
        return tuple(size // parts.get(dim, 1) for dim, size in enumerate(shape))

    return {
        block: {
            name: (shape[0] * shape[1], *shape[2:])
            if name in stacked and len(shape) > 1
            else of_rank(block, name, shape)
            for name, shape in shapes.items()
        }
        for block, shapes in model["shapes"].items()
    }


def _whole_islands(model: Mapping[str, Any]) -> bool:
    """Whether a block's parameters all have one dtype, so that a table of blocks says it."""
    blocks = {name.rpartition(".")[0] for name in model["islands"]}
    return len(model["islands"]) == sum(len(model["shapes"][block]) for block in blocks)
