"""A failure under FSDP2 and DCP as a script: `fully_shard`, torch.optim, and the state-dict and checkpoint calls of a
training script. Values for the template `fsdp2.py.j2`. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardproof.export.case import HANGS, RAISES, TRAINED, TYPED, WRITTEN, FailureCase, NoExportError
from shardproof.export.model import TORCH_NAME, model_values, optimizer_call, start, tensor_call
from shardproof.export.script import Draft
from shardproof.mechanisms.fsdp2.formats import HUB, CheckpointPlan, checkpoint_plan, hub_folder
from shardproof.mechanisms.fsdp2.limits import IGNORED
from shardproof.models import ParamSpec
from shardproof.program import Op
from shardproof.scenario import Mesh, Scenario

CLASSES = {
    "sgd": "torch.optim.SGD",
    "adam": "torch.optim.Adam",
    "adamw": "torch.optim.AdamW",
    "muon": "torch.optim.Muon",
}
WRAPPED = {
    "except": "CheckpointException",
    "unwrap": "error = next(iter(error.failures.values()))[0]  # the first rank's",
}
STATE_KEYS = {"momentum": "momentum_buffer"}
SETTING_OF = {"beta1": "betas", "beta2": "betas", "eps": "eps"}
"""Setting of a param group that a script compares → the key that torch has it under."""
STEPS = ("step", "compute_gradients")
"""Operations with a backward pass."""


def draft_script(case: FailureCase) -> Draft:
    """The draft of a case.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    case.require_comparable()
    scenario, model = case.scenario, model_values(case)
    _require(case, model)
    if case.weights_alone and case.focus.role == "param" and scenario.checkpoint == "dcp":
        return _draft_of_weights(case)
    plan = checkpoint_plan(scenario.checkpoint)
    if case.focus.kind == HANGS and case.focus.op.kind == "load" and plan.broadcast_from_rank0 and not case.whole:
        return _draft_of_broadcast(case, plan)
    if case.focus.kind == RAISES and case.focus.op.kind == "recall" and plan.broadcast_from_rank0 and not case.whole:
        return _draft_of_kept(case, plan)
    hollow = plan.flatten and any(not names for _, names in model["groups"])
    if case.focus.kind == RAISES and case.focus.op.kind == "load" and hollow and not case.whole:
        return _draft_of_empty_group(case, plan)
    mesh = case.ops[-1].mesh
    cut = any(op.mesh.tp > 1 for op in case.ops)
    values = {
        **model,
        "optimizer": _optimizer(case, model),
        "exact": case.focus.kind == TRAINED,
        "stepping": case.does(*STEPS),
        "model_call": _model_call(model, exact=case.focus.kind == TRAINED, used=not case.does(*STEPS)),
        "dp": mesh.dp,
        "tp_size": mesh.tp,
        "tp_cut": cut,
        "tp_dims": model["tp"] if _all_names(model) - model["tp"].keys() or set(model["tp"].values()) != {0} else {},
        "state_options": _state_options(plan),
        "hub": plan.form == HUB,
        "state_key": STATE_KEYS.get(case.focus.role, case.focus.role),
        "local": case.is_local,
        "unfrozen_at": next((op.iteration for op in case.ops if op.kind == "unfreeze"), 0),
    }
    calls, value = _calls(case, model, values, plan), "read(model, optimizer)"
    if case.focus.group is not None:
        told, value = _setting(case, case.focus.group)
        calls |= told
    library = f"torch {case.result.version}"
    return Draft("shardproof.mechanisms.fsdp2", "fsdp2.py.j2", calls, value, values, library)


def _optimizer(case: FailureCase, model: dict[str, Any]) -> str:
    """The call that makes the optimizer."""
    text = optimizer_call(case, CLASSES, _kernel(case.scenario))
    return text.replace("parameters", "param_groups(model)") if model["groups"] else text


def _rebuilt(case: FailureCase) -> str:
    """Further arguments of the optimizer: where a setting is compared that a load must restore, each build has another
    value of it."""
    key = SETTING_OF.get(case.focus.setting)
    if key is None:
        return ""
    first, later = (_value_of(case, key, build) for build in (0, 1))
    return f", {key}={first!r} if $number == 0 else {later!r}"


def _value_of(case: FailureCase, key: str, build: int) -> object:
    ask = case.scenario.optimizer.at_build(build)
    return (ask.beta1, ask.beta2) if key == "betas" else ask.eps


def _setting(case: FailureCase, group: int) -> tuple[dict[str, str], str]:
    """What is compared of a param group's setting after a load: the words and the expected value, and the expression
    of what is observed."""
    key = SETTING_OF[case.focus.setting]
    told = {
        "subject": f"{key} of optimizer.param_groups[{group}] after the load",
        "expected": repr(_value_of(case, key, 0)),
    }
    observed = f'optimizer.param_groups[{group}].get("{key}"'
    return told, f"tuple({observed}, ()))" if key == "betas" else f"{observed})"


def _draft_of_weights(case: FailureCase) -> Draft:
    """A script of one module without an optimizer, for a weight that goes through a checkpoint."""
    (module,), mesh, own = case.modules, case.ops[-1].mesh, case.focus.fqn.rpartition(".")[2]
    cut = any(op.mesh.tp > 1 for op in case.ops)
    params = ", ".join(f'"{p.name}": {_weight(case, p, cut=cut)}' for p in module.params if not p.tied_to)
    shard = ", ".join(f"{name}={value}" for name, value in _shard_options(case.scenario, mesh, case))
    build = [
        f"mesh = {mesh_call(case, case.scenario.device)}",
        "torch.manual_seed($number)",
        f"model = nn.ParameterDict({{{params}}})",
        f"fully_shard(model, {shard})",
    ]
    state = 'state = {"model": get_model_state_dict(model)}'
    calls = {
        "state": "model",
        "start": start(case, "gloo"),
        "build": "\n".join(build),
        "save": f"{state}\ndcp.save(state, checkpoint_id=CHECKPOINT)",
        "load": f'{state}\ndcp.load(state, checkpoint_id=CHECKPOINT)\nset_model_state_dict(model, state["model"])',
    }
    calls["load_model_only"] = calls["load"]
    value = f"model.{own}.detach().{'to_local().clone' if case.is_local else 'full_tensor'}()"
    values = _plain_values(case, cut=cut)
    return Draft("shardproof.mechanisms.fsdp2", "fsdp2.py.j2", calls, value, values, f"torch {case.result.version}")


def _draft_of_broadcast(case: FailureCase, plan: CheckpointPlan) -> Draft:
    """A script of one layer whose state dicts rank 0 hands to the others: a load that does not end needs no file."""
    calls = {
        "state": "model",
        "start": start(case, "gloo"),
        "build": "\n".join(
            [
                f"mesh = {mesh_call(case, case.scenario.device)}",
                "model = nn.Linear(4, 4)",
                "fully_shard(model, mesh=mesh)",
                "optimizer = torch.optim.AdamW(model.parameters())",
            ]
        ),
        "save": "weights, state = get_state_dict(model, optimizer, options=OPTIONS)",
        "load": "\n".join(
            [
                "if dist.get_rank() != 0:",
                "    weights, state = {}, {}  # what rank 0 alone has read",
                "set_state_dict(",
                "    model, optimizer, model_state_dict=weights, optim_state_dict=state, options=OPTIONS",
                ")",
            ]
        ),
    }
    return _draft_without_file(case, plan, calls)


def _draft_of_empty_group(case: FailureCase, plan: CheckpointPlan) -> Draft:
    """A script of one layer and an optimizer with a group that has no parameter, whose flattened state dict is loaded:
    that needs no sharding and no file."""
    calls = {
        "start": "",
        "build": 'model = nn.Linear(2, 2)\ngroups = [{"params": model.parameters()}, {"params": [], "lr": 0.5}]\n'
        "optimizer = torch.optim.AdamW(groups)",
        "save": "state = get_optimizer_state_dict(model, optimizer, options=OPTIONS)",
        "load": "set_optimizer_state_dict(model, optimizer, state, options=OPTIONS)",
        "works": "the state dict is loaded",
    }
    return _draft_without_file(case.on_one_rank(), plan, calls)


def _draft_of_kept(case: FailureCase, plan: CheckpointPlan) -> Draft:
    """A script of one layer and a state dict that the caller keeps: what the dict holds after a load and a step, and
    what becomes of a second load. One rank shows both."""
    whole = "(weight.full_tensor() if isinstance(weight, DTensor) else weight)"
    calls = {
        "start": start(case.on_one_rank(), "gloo"),
        "build": "model = nn.Linear(4, 4, bias=False)\nfully_shard(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)",
        "keep": 'kept = {"weight": torch.ones(4, 4)}',
        "recall": "\n".join(
            [
                "set_model_state_dict(model, kept, options=OPTIONS)",
                "model(torch.ones(4)).sum().backward()",
                "optimizer.step()",
                'weight, again = kept["weight"], "ends"',
                f"held = type(weight).__name__, {whole}.unique().tolist()",
                "try:",
                "    set_model_state_dict(model, kept, options=OPTIONS)",
                f"except {case.focus.error.rpartition('.')[2]} as error:",
                '    again = f"raises {type(error).__name__}: {error}"',
            ]
        ),
        "subject": "weight of the kept dict after one load and one step of training, and a second load of the dict",
        "expected": '("Tensor", [1.0], "ends")',
    }
    ops = {op.kind: op for op in reversed(case.ops)}
    return _draft_without_file(case.on_one_rank(), plan, calls, (ops["build"], ops["keep"], ops["recall"]))


def _draft_without_file(
    case: FailureCase, plan: CheckpointPlan, calls: dict[str, str], shown: tuple[Op, ...] = ()
) -> Draft:
    """A script that loads the state dicts of its own save.

    Args:
        shown: the operations of one that compares what they left, in place of that load.
    """
    ops = {op.kind: op for op in reversed(case.ops) if op.kind in calls}
    ended = case.only(shown or (ops["build"], ops["save"], ops["load"]))
    ended = ended.on_one_rank() if shown else ended
    values = {**_plain_values(case, cut=False), "state_options": _state_options(plan)}
    library, observed = f"torch {case.result.version}", "(*held, again)" if shown else "None"
    return Draft("shardproof.mechanisms.fsdp2", "fsdp2.py.j2", calls, observed, values, library, case=ended)


def _plain_values(case: FailureCase, *, cut: bool) -> dict[str, Any]:
    """What the template needs to know of a script with a model of its own."""
    return {
        **model_values(case),
        "exact": False,
        "stepping": False,
        "model_call": "None",
        "tp_cut": cut,
        "state_options": "",
        "hub": False,
        "state_key": "",
        "local": True,
        "optimizer": "None",
        "tp_dims": {},
        "unfrozen_at": 0,
        "dp": 1,
    }


def _weight(case: FailureCase, p: ParamSpec, *, cut: bool) -> str:
    value = tensor_call(case, p)
    place = "Replicate()" if p.tp_dim is None else f"Shard({p.tp_dim})"
    return f'distribute_tensor({value}, mesh["tp"], [{place}])' if cut else value


def _model_call(model: dict[str, Any], *, exact: bool, used: bool) -> str:
    """The expression that makes the model. used: whether no forward is there from which anything could be missing."""
    name = "Model" if model["unused_blocks"] and not used else "nn.Sequential"
    block = "Block(path, shapes)" if exact or model["islands"] else "Block(shapes)"
    return f"{name}(OrderedDict((path, {block}) for path, shapes in SHAPES.items()))"


def _all_names(model: dict[str, Any]) -> set[str]:
    return {f"{path}.{name}" for path, shapes in model["shapes"].items() for name in shapes}


def _calls(case: FailureCase, model: dict[str, Any], values: dict[str, Any], plan: CheckpointPlan) -> dict[str, str]:
    """What each operation is, in FSDP2's and DCP's words."""
    given = ", options=OPTIONS" if values["state_options"] else ""
    one = f'set_model_state_dict(model, state["model"]{given})'
    where = 'model_state_dict=state["model"], optim_state_dict=state["optim"]'
    put = [f"set_state_dict(model, optimizer, {where}{given})"]
    if given:
        put = ["set_state_dict(", f"    model, optimizer, {where}{given}", ")"]
    if plan.broadcast_from_rank0 and not plan.combined:
        put = [one, f'set_optimizer_state_dict(model, optimizer, state["optim"]{given})']
    if plan.form == "full":
        save = [
            "state = state_dicts(model, optimizer)",
            "if dist.get_rank() == 0:",
            "    torch.save(state, CHECKPOINT)",
            "dist.barrier()",
        ]
        load = ["state = torch.load(CHECKPOINT)", *put]
        if case.ops[-1].mesh.world == 1:
            save = ["torch.save(state_dicts(model, optimizer), CHECKPOINT)"]
        if plan.broadcast_from_rank0:
            load[0] += ' if dist.get_rank() == 0 else {"model": {}, "optim": {}}'
    elif plan.form == HUB:
        save = ["state = state_dicts(model, optimizer)", *_hub_writer(plan)]
        save.append('dcp.save({"optim": state["optim"]}, checkpoint_id=CHECKPOINT)')
        load = ["state = state_dicts(model, optimizer)", *_hub_reader(plan)]
        load += ['dcp.load({"optim": state["optim"]}, checkpoint_id=CHECKPOINT)', *put]
    else:
        save = ["dcp.save(state_dicts(model, optimizer), checkpoint_id=CHECKPOINT)"]
        load = ["state = state_dicts(model, optimizer)", "dcp.load(state, checkpoint_id=CHECKPOINT)", *put]
    error = case.result.error
    bare = error is not None and bool(error.traceback) and WRAPPED["except"] not in error.traceback
    wrapped = case.focus.op.kind in ("save", "load", "load_model_only") and plan.form != "full" and not bare
    return {
        **(WRAPPED if wrapped else {}),
        "start": start(case, "gloo"),
        "build": "\n".join(_build(case, model, values)),
        "step": "\n".join([*_backward(case), *STEP]),
        "compute_gradients": "\n".join(_backward(case)),
        "apply_gradients": "\n".join(STEP),
        "keep": "kept = copy.deepcopy(state_dicts(model, optimizer))",
        "recall": "\n".join(put).replace("state[", "kept["),
        "unfreeze": "\n".join(f"model.{block}.requires_grad_(True)" for block in model["later"]),
        "save": "\n".join(save),
        "save_kept": "\n".join(line.replace("state_dicts(model, optimizer)", "kept") for line in save),
        "replace_params": "\n".join(REPLACE),
        "load": "\n".join(load),
        "load_model_only": "\n".join(
            [load[0], one]
            if plan.form == "full"
            else [
                f'state = {{"model": get_model_state_dict(model{given})}}',
                *(_hub_reader(plan) if plan.form == HUB else ["dcp.load(state, checkpoint_id=CHECKPOINT)"]),
                one,
            ]
        ),
    }


def _hub_writer(plan: CheckpointPlan) -> list[str]:
    """The calls that write a state dict's model as safetensors."""
    asked = f"save_distributed=True, enable_consolidation={not plan.in_shards}"
    where = f'CHECKPOINT + "{_hub_part(plan)}"'
    if not plan.two_files:
        return [f"writer = HuggingFaceStorageWriter({where}, {asked})", DCP_SAVE]
    files = 'files = {fqn: 1 + number % 2 for number, fqn in enumerate(state["model"])}'
    return [files, f"writer = HuggingFaceStorageWriter({where}, files, {asked})", DCP_SAVE]


def _hub_reader(plan: CheckpointPlan) -> list[str]:
    """The calls that read a state dict's model from safetensors."""
    reader = f'reader = HuggingFaceStorageReader(CHECKPOINT + "{_hub_part(plan)}")'
    return [reader, 'dcp.load(state["model"], storage_reader=reader)']


def _hub_part(plan: CheckpointPlan) -> str:
    return f"/{hub_folder(plan, Path()).as_posix()}"


DCP_SAVE = 'dcp.save(state["model"], storage_writer=writer)'


def _build(case: FailureCase, model: dict[str, Any], values: dict[str, Any]) -> list[str]:
    scenario, mesh = case.scenario, case.ops[-1].mesh
    exact = case.focus.kind == TRAINED
    make = (
        ["model = make_model($number)"] if exact else ["torch.manual_seed($number)", f"model = {values['model_call']}"]
    )
    lines = [f"mesh = {mesh_call(case, scenario.device)}", *make]
    ties = [f"model.{alias} = model.{name}" for alias, name in model["tied"].items()]
    lines += [] if values["tp_cut"] else ties
    lines += [f"model.{block}.requires_grad_(False)" for block in model["frozen"]]
    lines += ['tensor_parallel(model, mesh["tp"])', *ties] if values["tp_cut"] else []
    options = _shard_options(scenario, mesh, case)
    told = f"mesh={options[0][1]}"
    if len(options) > 1:
        lines.append(f"options = {{{', '.join(f'{name!r}: {value}' for name, value in options)}}}".replace("'", '"'))
        told = "**options"
    each = [f"fully_shard(model.{unit}, {told})" for unit in model["units"]]
    lines += each or ["for block in model:", f"    fully_shard(block, {told})"]
    lines.append(f"fully_shard(model, {told})")
    lines += ["model.set_reduce_scatter_unused_params(True)"] if model["lone_names"] else []
    made = values["optimizer"].replace("parameters", "model.parameters()")
    return [*lines, f"optimizer = {made[:-1]}{_rebuilt(case)})"]


REPLACE = (
    "torch.manual_seed(1000)",
    "weights = {name: torch.randn(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}",
    "set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))",
)
"""Other weights, which every rank has whole."""

STEP = ("optimizer.step()", "optimizer.zero_grad()")


def _backward(case: FailureCase) -> list[str]:
    scenario, count = case.scenario, case.scenario.microbatches
    exact = case.focus.kind == TRAINED
    ones = "torch.ones(1, requires_grad=True)"
    if count == 1:
        return [f"model(({ones}, $number))[0].backward()" if exact else f"model({ones}).backward()"]
    lines = [f"for batch in range({count}):"]
    if scenario.grad_sync == "last":
        lines.append(f"    model.set_requires_gradient_sync(batch == {count - 1})")
    batch = f"{count} * $number + batch"
    lines.append(f"    model(({ones}, {batch}))[0].backward()" if exact else f"    model({ones}).backward()")
    return lines


def _require(case: FailureCase, model: dict[str, Any]) -> None:
    scenario, ask = case.scenario, case.scenario.optimizer
    plan = checkpoint_plan(scenario.checkpoint)
    wanted = {
        "gradient clipping": bool(ask.clip), "a loss scale": bool(ask.loss_scale),
        "settings of param groups but betas and eps": bool(case.focus.setting) and case.focus.setting not in SETTING_OF,
        "a learning-rate schedule": ask.schedule != "none", "a learning rate that is a tensor": ask.tensor_lr,
        "param groups of their own in a comparison of steps": bool(model["groups"]) and case.focus.kind == TRAINED,
        "full state dicts that rank 0 alone keeps": case.does("recall") and scenario.checkpoint.startswith("full+cpu"),
        "parameters that FSDP ignores": IGNORED in scenario.options,
        f"the checkpoint format {scenario.checkpoint}": plan.form in ("dcp-async", "dcp-stateful")
        and case.does("save", "keep"),
        "a comparison of what a checkpoint holds": case.focus.kind == WRITTEN,
        "a comparison of dtypes": case.focus.kind == TYPED,
        "tied parameters in a comparison": case.focus.kind not in (RAISES, HANGS) and scenario.model == "tied",
        "microbatches in a comparison": case.focus.kind == TRAINED and scenario.microbatches > 1,
        "parameters of one rank alone in a comparison": case.focus.kind not in (RAISES, HANGS)
        and bool(model["lone_names"]),
        "tensor parallelism in a comparison of steps": case.focus.kind == TRAINED and case.ops[-1].mesh.tp > 1,
    }  # fmt: skip
    NoExportError.unless_all_done(case.result, "FSDP2", wanted)


def _kernel(scenario: Scenario) -> dict[str, Any]:
    impl = scenario.optimizer.impl
    own: dict[str, Any] = {} if impl == "foreach" else {"fused" if impl == "fused" else "foreach": impl == "fused"}
    return own | ({"nesterov": True} if scenario.optimizer.nesterov else {})


def mesh_call(case: FailureCase, device: str) -> str:
    """The call that makes the device mesh of the last operation, with names for its dims."""
    names, sizes = _dims(case, case.ops[-1].mesh)
    given = f"({', '.join(map(str, sizes))}{',' * (len(sizes) == 1)})"
    if len(case.parts) > 1:
        return _mesh_of_world(case, device)
    return f'init_device_mesh("{device}", {given}, mesh_dim_names={_quoted(names)})'


def _mesh_of_world(case: FailureCase, device: str) -> str:
    """The mesh of a script whose two parts have worlds of different size: told by that size."""
    names, _ = _dims(case, case.ops[-1].mesh)
    told = {part[0].mesh.world: _dims(case, part[0].mesh)[1] for part in case.parts}
    return f'init_device_mesh("{device}", {told!r}[dist.get_world_size()], mesh_dim_names={_quoted(names)})'


def _quoted(names: tuple[str, ...]) -> str:
    return repr(names).replace("'", '"')


def _dims(case: FailureCase, mesh: Mesh) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The dims that are larger than 1 on some mesh of the case; dp_shard always."""
    every = [op.mesh for op in case.ops]
    asked = {
        "dp_replicate": max(m.dp_replicate for m in every) > 1,
        "dp_shard": True,
        "tp": max(m.tp for m in every) > 1,
    }
    names = tuple(name for name, there in asked.items() if there)
    return names, tuple(getattr(mesh, name) for name in names)


def _shard_options(scenario: Scenario, mesh: Mesh, case: FailureCase) -> list[tuple[str, str]]:
    names = _dims(case, mesh)[0]
    data = tuple(name for name in names if name != "tp")
    place = "mesh" if len(names) == len(data) else f"mesh[{data[0] if len(data) == 1 else data!r}]"
    place = f'mesh["{data[0]}"]' if place != "mesh" and len(data) == 1 else place
    options = [("mesh", place)]
    dtype, after = scenario.dtype, scenario.reshard_after_forward
    stages = {"param_dtype": dtype.param, "reduce_dtype": dtype.reduce, "output_dtype": dtype.output}
    asked = ", ".join(f"{name}={TORCH_NAME[value]}" for name, value in stages.items() if value)
    if asked:
        options.append(("mp_policy", f"MixedPrecisionPolicy({asked})"))
    if after != "true":
        words = {"false": "False", "none": "None"}
        options.append(("reshard_after_forward", words.get(after, after)))
    if scenario.offload.fraction:
        options.append(("offload_policy", "CPUOffloadPolicy(pin_memory=torch.cuda.is_available())"))
    return options


def _state_options(plan: CheckpointPlan) -> str:
    flags = {
        "full_state_dict": plan.form == "full", "cpu_offload": plan.cpu_offload,
        "broadcast_from_rank0": plan.broadcast_from_rank0, "flatten_optimizer_state_dict": plan.flatten,
    }  # fmt: skip
    given = [f"{name}=True" for name, on in flags.items() if on] + ["strict=False"] * (not plan.strict)
    return ", ".join(given)
