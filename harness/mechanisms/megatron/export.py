"""A failure of Megatron-Core's optimizers as a script: DDP or FSDP, the optimizer, and the checkpoint calls of the
training script. Values for the template `megatron.py.j2`. No torch.

A script asks for `cuda`. On a machine without a GPU the module `gpu_on_cpu.py` beside it gives the CPU that name, and
has a plain FusedAdam where a scenario steps with one. Without it Megatron-Core takes torch.optim's, as it does wherever
neither TransformerEngine nor apex is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.export.case import KEPT, RAISES, TRAINED, TYPED, WRITTEN, Case, NoExportError
from harness.export.model import TORCH_NAME, model_values, start
from harness.export.script import Draft
from harness.mechanisms.megatron import export_groups as groups
from harness.mechanisms.megatron.switches import BUCKET_SIZE, GPT_MODEL
from harness.mechanisms.stand_ins import MODULE, gpu_on_cpu
from harness.oracle.contract import half_dtype
from harness.scenario import Scenario

STATE_KEYS = {"momentum": "momentum_buffer"}
STATE_DTYPE = TORCH_NAME | {"fp8e4m3": "torch.uint8"}
"""What the optimizer config calls a dtype: fp8 is uint8 there."""


@dataclass(frozen=True)
class Store:
    """How a checkpoint is written and read. form: the format's name. strategy: whether ranks share the work
    (`fully_parallel`) and whether the writing is asynchronous. metadata: what `sharded_state_dict` is told. fsdp: the
    strategy of Megatron-FSDP; empty under DDP."""

    form: str
    fully_parallel: bool = False
    asynchronous: bool = False
    metadata: str = "{}"
    fsdp: str = ""
    trusted: bool = False


def draft(case: Case, store: Store, *, local_state: bool = False) -> Draft:
    """The draft of a case.

    Args:
        local_state: FusedAdam keeps the state of DTensors as plain local tensors.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    lean, fused_linear, idle = _is_lean(case, store), _fused_linear(case, store), _is_idle(case)
    case = case.on_one_rank() if lean or fused_linear or idle else case
    scenario = case.scenario
    _require(case, store)
    nested = any("." in m.path for m in case.spec.modules)
    model = model_values(case, nested=nested)
    half = half_dtype(scenario.dtype)
    values = {
        **model,
        "shapes": _fused(case, model),
        "stepping": case.does("step", "overflow"),
        "nested": nested,
        "by_block": not (store.fsdp or nested or "overlap_param_gather" in scenario.options) and _whole_islands(model),
        "fp32_blocks": list(dict.fromkeys(name.rpartition(".")[0] for name in model["islands"])),
        "config": _call("TransformerConfig", _config(half)),
        "wrapped": bool(store.fsdp and half) or bool(fused_linear),
        "form": store.form,
        "metadata": store.metadata,
        "offload": scenario.offload.fraction > 0,
        "precise": _is_precise(scenario),
        "remainder": _is_precise(scenario) and half == "bf16" and not scenario.offload.fraction,
        "gathers": _gathers(case),
        "inner": "optimizer.chained_optimizers[0]",
        "state_key": STATE_KEYS.get(case.focus.role, case.focus.role),
        "written_name": model["fqn"],
        "shim": MODULE,
        "lean": lean,
        "fused_linear": fused_linear,
        "shape": repr(case.spec.param(case.focus.fqn).spec.shape) if lean else "",
    }
    calls = {
        "start": "\n".join(_start(case)),
        "build": "\n".join(_build(case, store, half)),
        "step": "\n".join(_step(case)),
        "reload_params": "optimizer.reload_model_params()",
        **_checkpoint(store, case),
    }
    if idle:
        calls["expected"] = f"torch.zeros({case.spec.param(case.focus.fqn).spec.numel})"
    if groups.scheduled(case):
        calls["state"] = groups.STATE
    value = "read(model, optimizer)"
    if fused_linear:
        calls |= _fused_calls(case, store, half, fused_linear["columns"])
    if lean:
        calls |= {"expected": f"model.module.{_own(case)}.detach().flatten().float().cpu()"}
        calls |= {"build": "\n".join(_lean_build(case, half))}
        calls |= {"save": "torch.save(model.state_dict(), CHECKPOINT)"}
        calls |= {"load_model_only": "model.load_state_dict(torch.load(CHECKPOINT))"}
        masters = "optimizer.chained_optimizers[0].optimizer.param_to_inner_param.values()"
        value = f"next(iter({masters})).detach().flatten().cpu()"
    library = f"{case.scenario.system} {case.result.version}"
    fused = scenario.optimizer.impl == "multi_tensor"
    shims = gpu_on_cpu(fused=fused, local_state=local_state, precise=_is_precise(scenario))
    return Draft(
        "harness.mechanisms.megatron",
        "megatron.py.j2",
        calls,
        value,
        values,
        library,
        shims,
        case=case if lean or fused_linear or idle else None,
    )


def _is_lean(case: Case, store: Store) -> bool:
    """Whether a script of one parameter shows it: a master on the host that must be its weight, which was loaded."""
    offloaded = case.focus.role == "master" and case.scenario.offload.fraction > 0
    return case.weights_alone and offloaded and store.form in ("dp_zero", "plain", "weights")


def _fused_linear(case: Case, store: Store) -> dict[str, Any]:
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


def _fused_calls(case: Case, store: Store, half: str | None, columns: int) -> dict[str, str]:
    """Build, step and save of a script with one fused layer."""
    values = {"lr": repr(case.scenario.optimizer.lr)}
    values |= {name: value for name, value in _optimizer(case.scenario, half).items() if name not in _PLAIN}
    model, dtype = ("Float16Module(CONFIG, Model())", f", dtype={TORCH_NAME[half]}") if half else ("Model()", "")
    names = 'state["model"], state["optimizer"]'
    build = [
        "ddp_config = DistributedDataParallelConfig(",
        f'    use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy="{store.fsdp}"',
        ")",
        f"model = FullyShardedDataParallel(CONFIG, ddp_config, {model}, fsdp_unit_modules=[nn.Linear])",
        *_spread("config", "OptimizerConfig", values),
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


def _own(case: Case) -> str:
    return case.focus.fqn.rpartition(".")[2]


def _lean_build(case: Case, half: str | None) -> list[str]:
    scenario = case.scenario
    values = {"lr": repr(scenario.optimizer.lr)}
    values |= {name: value for name, value in _optimizer(scenario, half).items() if name not in _PLAIN}
    return [
        "torch.manual_seed($number)",
        "model = Model()",
        "model = DistributedDataParallel("
        "model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)",
        *_spread("config", "OptimizerConfig", values),
        "optimizer = get_megatron_optimizer(config, [model])",
    ]


_PLAIN = ("optimizer", "weight_decay", "clip_grad", "decoupled_weight_decay")
"""Options that do not matter where no step is taken."""


def _require(case: Case, store: Store) -> None:
    scenario, ask, role = case.scenario, case.scenario.optimizer, case.focus.role
    sharded = {"master", "exp_avg", "exp_avg_sq", "momentum", "step"}
    compared = case.focus.kind in (KEPT, WRITTEN, TRAINED)
    wanted = {
        "a GPTModel": scenario.model == GPT_MODEL,
        "expert parallelism": scenario.expert_parallel > 1,
        "tensor parallelism": any(op.mesh.tp > 1 for op in case.ops),
        "tied parameters": scenario.model == "tied",
        "a schedule in other formats than dp_zero": groups.scheduled(case) and store.form != "dp_zero",
        "param groups of their own but for their settings": groups.own_groups(case) and not case.focus.setting,
        "param groups of their own before 0.16": groups.own_groups(case) and not _knows_overrides(case),
        "overflowing steps": case.does("overflow"),
        "comparisons of steps": case.focus.kind == TRAINED and not _is_idle(case),
        "more than masters of the offloading precision-aware optimizer, in dp_zero": _is_precise(scenario)
        and scenario.offload.fraction > 0
        and compared
        and (role != "master" or store.form != "dp_zero"),
        "comparisons of dtypes": case.focus.kind == TYPED,
        "comparisons of checkpoints without a distributed optimizer": compared and scenario.sharding != "zero1",
        "parameters of several dtypes under Megatron-FSDP": bool(store.fsdp)
        and scenario.dtype.storage.startswith("mixed"),
        "comparisons under Megatron-FSDP": compared and bool(store.fsdp),
        "comparisons on several ranks": compared
        and role in sharded
        and case.ops[-1].mesh.world > 1
        and not _gathers(case),
        "another number of ranks for the load": len(case.parts) > 1,
        "other optimizers than Adam's under FusedSGD's name": ask.kind == "sgd" and ask.impl == "multi_tensor",
    }
    lacking = [what for what, asked in wanted.items() if asked]
    if lacking:
        raise NoExportError.because(case.result, f"scripts for Megatron-Core do not do {' and '.join(lacking)} yet")


def _knows_overrides(case: Case) -> bool:
    """Whether the release is told of groups by overrides, as from 0.16 on."""
    return tuple(map(int, case.result.version.split(".")[:2])) >= (0, 16)


def _is_idle(case: Case) -> bool:
    """Whether it is about moments of a parameter that no forward uses: they are zero after any step."""
    focus = case.focus
    return (
        focus.kind == TRAINED and focus.role in ("exp_avg", "exp_avg_sq") and not case.spec.param(focus.fqn).spec.used
    )


def _is_precise(scenario: Scenario) -> bool:
    """Whether masters and moments lie inside FusedAdam, in dtypes of their own."""
    return "precision_aware" in scenario.options


def _gathers(case: Case) -> bool:
    """Whether a script puts a value together of the shards that several ranks have: masters that are offloaded."""
    return case.focus.role == "master" and case.ops[-1].mesh.world > 1 and case.scenario.offload.fraction > 0


def _fused(case: Case, model: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes as the library has them: what is fused of equal sections has no dim for them."""
    stacked = {p.spec.name for p in case.spec.params if p.spec.stacked}
    return {
        block: {
            name: (shape[0] * shape[1], *shape[2:]) if name in stacked and len(shape) > 1 else shape
            for name, shape in shapes.items()
        }
        for block, shapes in model["shapes"].items()
    }


def _whole_islands(model: Mapping[str, Any]) -> bool:
    """Whether a block's parameters all have one dtype, so that a table of blocks says it."""
    blocks = {name.rpartition(".")[0] for name in model["islands"]}
    return len(model["islands"]) == sum(len(model["shapes"][block]) for block in blocks)


def _call(name: str, values: Mapping[str, str]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"


def _spread(target: str, name: str, values: Mapping[str, str]) -> list[str]:
    """An assignment of a call, over several lines where it is long."""
    line = f"{target} = {_call(name, values)}"
    if len(line) <= 112:
        return [line]
    lines, row = [f"{target} = {name}("], "   "
    for key, value in values.items():
        if len(row) + len(key) + len(value) > 106:
            lines.append(row)
            row = "   "
        row += f" {key}={value},"
    return [*lines, row, ")"]


def _config(half: str | None) -> dict[str, str]:
    values = {"num_layers": "1", "hidden_size": "8", "num_attention_heads": "2"}
    return values | ({half: "True"} if half else {})


def _start(case: Case) -> list[str]:
    several = case.ops[-1].mesh.world > 1
    replicas = case.ops[-1].mesh.dp_replicate
    parallel = f"num_distributed_optimizer_instances={replicas}" if replicas > 1 else ""
    return [
        *(['torch.cuda.set_device(int(os.environ["RANK"]))'] * several),
        start(case, "nccl"),
        f"parallel_state.initialize_model_parallel({parallel})",
    ]


def _build(case: Case, store: Store, half: str | None) -> list[str]:
    scenario = case.scenario
    wrapper = "FullyShardedDataParallel" if store.fsdp else "DistributedDataParallel"
    units = ", fsdp_unit_modules=[Block]" if store.fsdp == "optim_grads_params" else ""
    values = _optimizer(scenario, half) | ({"min_lr": "0.0"} if groups.scheduled(case) else {})
    return [
        "torch.manual_seed($number)",
        f"model = {'Float16Module(CONFIG, Model())' if store.fsdp and half else 'Model()'}",
        *_spread("ddp_config", "DistributedDataParallelConfig", _ddp(case, store)),
        f"model = {wrapper}(model.config, ddp_config, model{units})",
        *_spread("config", "OptimizerConfig", values),
        *_optimizer_lines(case),
    ]


def _optimizer_lines(case: Case) -> list[str]:
    if not groups.scheduled(case):
        return ["optimizer = get_megatron_optimizer(config, [model])"]
    return [
        f"overrides = {groups.overrides(case)}",
        "optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides)",
        *groups.scheduler(case),
    ]


def _ddp(case: Case, store: Store) -> dict[str, str]:
    scenario, options = case.scenario, case.scenario.options
    flags = {
        "use_megatron_fsdp": bool(store.fsdp),
        "use_distributed_optimizer": scenario.sharding == "zero1",
        "grad_reduce_in_fp32": scenario.dtype.reduce == "fp32",
        "overlap_grad_reduce": "overlap_grad_reduce" in options,
        "overlap_param_gather": "overlap_param_gather" in options,
        "average_in_collective": "average_in_collective" in options,
    }
    values = {name: "True" for name, on in flags.items() if on}
    if store.fsdp:
        values |= {"data_parallel_sharding_strategy": f'"{store.fsdp}"', "gradient_reduce_div_fusion": "False"}
    if case.ops[-1].mesh.dp_replicate > 1:
        values["num_distributed_optimizer_instances"] = str(case.ops[-1].mesh.dp_replicate)
    if "one_bucket" not in options and (store.fsdp or values.get("overlap_grad_reduce")):
        values["bucket_size"] = str(BUCKET_SIZE)
    return values


def _optimizer(scenario: Scenario, half: str | None) -> dict[str, str]:
    ask, fraction = scenario.optimizer, scenario.offload.fraction
    values = {
        "optimizer": '"sgd"' if ask.kind == "sgd" else '"adam"',
        "lr": repr(ask.lr),
        "weight_decay": repr(ask.weight_decay),
        "clip_grad": repr(ask.clip),
    }
    if half:
        values |= {half: "True", "params_dtype": TORCH_NAME[half]}
    if half == "fp16":
        scale = {"initial_loss_scale": repr(ask.loss_scale), "loss_scale_window": "2", "min_loss_scale": "1.0"}
        values |= scale if ask.loss_scale else {"loss_scale": "1.0"}
    if scenario.sharding == "zero1":
        values["use_distributed_optimizer"] = "True"
    if _is_precise(scenario):
        policy = scenario.dtype
        values["use_precision_aware_optimizer"] = "True"
        stored = {
            "exp_avg_dtype": policy.exp_avg,
            "exp_avg_sq_dtype": policy.exp_avg_sq,
            "main_params_dtype": policy.master,
        }
        values |= {name: STATE_DTYPE[dtype] for name, dtype in stored.items() if dtype and dtype != "fp32"}
    if ask.kind == "adam":
        values["decoupled_weight_decay"] = "False"
    if fraction:
        values |= {"optimizer_cpu_offload": "True", "optimizer_offload_fraction": repr(fraction)}
    if "overlap_param_gather" in scenario.options:
        values["overlap_param_gather"] = "True"
    for word, name in (
        ("torch_offload", "use_torch_optimizer_for_cpu_offload"),
        ("overlap_offload", "overlap_cpu_optimizer_d2h_h2d"),
    ):
        if word in scenario.options:
            values[name] = "True"
    return values


def _step(case: Case) -> list[str]:
    count = case.scenario.microbatches
    backward = 'optimizer.scale_loss(model(torch.ones(1, device="cuda", requires_grad=True)).sum()).backward()'
    lines = ["model.zero_grad_buffer()", "optimizer.zero_grad()"]
    if count > 1:
        lines += ["with model.no_sync():", f"    for _ in range({count - 1}):", f"        {backward}"]
    end = ["scheduler.step(increment=1)"] * groups.scheduled(case)
    return [*lines, backward, "finalize_model_grads([model])", "optimizer.step()", *end]


def _checkpoint(store: Store, case: Case) -> dict[str, str]:
    """Saving and loading, by format."""
    if store.fsdp:
        return _fsdp_checkpoint(case)
    if store.form == "dp_zero":
        state = '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
        save = [f'torch.save({state}, CHECKPOINT + ".model")', "optimizer.save_parameter_state(CHECKPOINT)"]
        load = [
            f'state = torch.load(CHECKPOINT + ".model"{", weights_only=False" if store.trusted else ""})',
            'model.load_state_dict(state["model"])',
            'optimizer.load_state_dict(state["optimizer"])',
            "optimizer.load_parameter_state(CHECKPOINT)",
        ]
        if groups.scheduled(case):
            save = [f"state = {state}", 'state["scheduler"] = scheduler.state_dict()', *save]
            save[2] = 'torch.save(state, CHECKPOINT + ".model")'
            load.append('scheduler.load_state_dict(state["scheduler"])')
        if case.focus.kind == WRITTEN:
            save = save[1:]
    elif store.form == "plain":
        save = ['torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, CHECKPOINT)']
        load = [
            f"state = torch.load(CHECKPOINT{', weights_only=False' if store.trusted else ''})",
            'model.load_state_dict(state["model"])',
            'optimizer.load_state_dict(state["optimizer"])',
        ]
    else:
        return _distributed_checkpoint(store)
    return {"save": "\n".join(save), "load": "\n".join(load), "load_model_only": "\n".join(load[:2])}


def _distributed_checkpoint(store: Store) -> dict[str, str]:
    group = "parallel_state.get_data_parallel_group(with_context_parallel=True)"
    save = ["os.makedirs(CHECKPOINT, exist_ok=True)"]
    given, loading = "", ""
    if store.fully_parallel:
        save += [
            'strategy = get_default_save_sharded_strategy("torch_dist")',
            f"strategy = FullyParallelSaveStrategyWrapper(strategy, {group})",
        ]
        given, loading = ", strategy", ", strategy"
    call = f"dist_checkpointing.save(sharded(model, optimizer, False), CHECKPOINT{given}"
    if store.asynchronous:
        save += [
            f"request = {call}, async_sharded_save=True)",
            "queue = AsyncCallsQueue()",
            "queue.schedule_async_request(request)",
            "queue.maybe_finalize_async_calls(blocking=True)",
        ]
    else:
        save.append(f"{call})")
    load = []
    if store.fully_parallel:
        load = [
            "strategy = get_default_load_sharded_strategy(CHECKPOINT)",
            f"strategy = FullyParallelLoadStrategyWrapper(strategy, {group})",
        ]
    load += [
        f"state = dist_checkpointing.load(sharded(model, optimizer, True), CHECKPOINT{loading})",
        'model.load_state_dict(state["model"])',
        'optimizer.load_state_dict(state["optimizer"])',
    ]
    weights = [
        'state = {"model": model.module.sharded_state_dict(metadata=METADATA)}',
        "state = dist_checkpointing.load(state, CHECKPOINT)",
        'model.load_state_dict(state["model"])',
    ]
    return {"save": "\n".join(save), "load": "\n".join(load), "load_model_only": "\n".join(weights)}


def _fsdp_checkpoint(case: Case) -> dict[str, str]:
    sections = {name for named in case.spec.params for name, _ in named.spec.sections}
    split = []
    if "_w" in sections:
        call = 'handle_swiglu_in_state_dict(model.module, state["model"], state["optimizer"])'
        split = [f'state["model"], state["optimizer"] = {call}']
    prepared = [*split, "preprocess_state_dict_for_uneven_dtensor(state)"]
    save = ["state = fsdp_state(model, optimizer, is_loading=False)", *prepared]
    load = ["state = fsdp_state(model, optimizer, is_loading=True)", *prepared]
    return {
        "save": "\n".join([*save, "dcp.save(state, checkpoint_id=CHECKPOINT)"]),
        "load": "\n".join(
            [
                *load,
                "dcp.load(state, checkpoint_id=CHECKPOINT)",
                'model.load_state_dict(state["model"])',
                'optimizer.load_state_dict(state["optimizer"])',
            ]
        ),
    }
