"""How a failure of TransformerEngine becomes a script: its layers or its FusedAdam under FSDP2 and DCP, as a training
script calls them. Values for the template `te.py.j2`. No torch.

A script has only the layers that its failure is about: that of the parameter that is compared, those that an error
names, and all where it names none. The loss is the sum of the parameters' squares, so that no kernel of a layer runs.
A script asks for `cuda`; without a GPU the module `gpu_on_cpu.py` beside it has the library's Python run on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardproof.export.case import KEPT, RAISES, TRAINED, TYPED, WRITTEN, FailureCase, NoExportError
from shardproof.export.model import TORCH_NAME, groups_call, optimizer_call, start, tensor_call
from shardproof.export.script import Draft
from shardproof.mechanisms.fsdp2.export import CLASSES, mesh_call
from shardproof.mechanisms.fsdp2.formats import checkpoint_plan
from shardproof.mechanisms.stand_ins import MODULE, gpu_on_cpu
from shardproof.models import ModuleSpec, storage_dtype
from shardproof.scenario import Scenario
from shardproof.systems.transformer_engine import export_own
from shardproof.systems.transformer_engine.contract import CONTRACT
from shardproof.systems.transformer_engine.layers import ATTENTION, LAYERS, NORMS, Layer
from shardproof.systems.transformer_engine.switches import (
    CALIBRATING,
    FP8_CURRENT,
    NO_EXTRA_STATE,
    QUANTISED,
    is_layers,
)

HOME = "shardproof.systems.transformer_engine"
RECIPES = {FP8_CURRENT: "Float8CurrentScaling()"}


def draft_script(case: FailureCase) -> Draft:
    """The draft of a case.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    own = export_own.draft_single_value_script(case)
    if own is not None:
        return own
    if _is_placeholder(case):
        return _draft_of_placeholder(case)
    case.require_comparable()
    scenario = case.scenario
    _require(case)
    named = _named(case)
    layers = LAYERS.get(scenario.model, {})
    values: dict[str, Any] = {
        "attributes": [_attribute(case, path, layers.get(path)) for path in named],
        "mesh_names": ("tp",) if case.ops[-1].mesh.tp > 1 else (),
        "stepping": case.does("step"),
        "read": ".float()" if _quantised(scenario) else "",
        "calibrated": [
            _flat(path) for path in named if CALIBRATING in scenario.options and layers[path].kind not in NORMS
        ],
        "fqn": _name(case, case.focus.fqn),
        "key": "master_param" if case.focus.role == "master" else case.focus.role,
        "shim": MODULE,
    }
    calls = {
        "start": "\n".join(
            ['torch.cuda.set_device(int(os.environ["RANK"]))'] * (case.ops[-1].mesh.world > 1) + [start(case, "nccl")]
        ),
        "build": "\n".join(_build(case, values, layers)),
        "step": "\n".join(_step(case)),
        **_checkpoint(case),
    }
    if case.focus.role == "master":  # of a parameter that is its own
        calls["expected"] = f'whole(model.get_parameter("{values["fqn"]}"))'
    if (
        case.result.error
        and "optimizers/fused_adam.py" in case.result.error.traceback
        and case.focus.op.kind == "build"
    ):
        calls["works"] = "the optimizer is built"
    calls["shape"] = f'stored_shape("{_stored_name(case, values["fqn"])}")'
    library = f"transformer-engine {case.result.version}"
    return Draft(HOME, "te.py.j2", calls, "read(model, optimizer)", values, library, gpu_on_cpu(extension=True))


def _is_placeholder(case: FailureCase) -> bool:
    """Whether a layer refuses what torch gives it in the place of an extra state that a full state dict lacks."""
    refused = case.focus.kind == RAISES and case.focus.op.kind == "load" and not case.whole
    full = checkpoint_plan(case.scenario.checkpoint).form == "full"
    there = bool(case.result.error and "set_extra_state" in case.result.error.traceback)
    return refused and full and there and NO_EXTRA_STATE in case.scenario.options


def _draft_of_placeholder(case: FailureCase) -> Draft:
    """A script of one layer, which loads its own weights without sharding."""
    ops = {op.kind: op for op in reversed(case.ops)}
    shown = case.only((ops["build"], ops["load"])).on_one_rank()
    calls = {
        "state": "model",
        "start": start(shown, "nccl"),
        "build": "model = te.Linear(4, 4)",
        "load": 'weights = {name: t for name, t in model.state_dict().items() if not name.endswith("_extra_state")}\n'
        "set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))",
        "works": "the state dict is loaded",
    }
    values = {"attributes": (), "mesh_names": (), "stepping": False, "read": "", "calibrated": (), "fqn": "", "key": ""}
    library, shims = f"transformer-engine {case.result.version}", gpu_on_cpu(extension=True)
    return Draft(HOME, "te.py.j2", calls, "None", {**values, "shim": MODULE}, library, shims, case=shown)


def _require(case: FailureCase) -> None:
    scenario, ask, kind = case.scenario, case.scenario.optimizer, case.focus.kind
    own_master = case.focus.role == "master" and bool(case.focus.difference and case.focus.difference.kind == "extra")
    counter = case.focus.role == "step" and CONTRACT.fused(scenario)
    wanted = {
        "gradient clipping": bool(ask.clip),
        "a loss scale": bool(ask.loss_scale),
        "settings of param groups": bool(case.focus.setting),
        "a learning-rate schedule": ask.schedule != "none",
        "microbatches": scenario.microbatches > 1,
        "comparisons after a load by another number of ranks": len(case.parts) > 1 and kind != RAISES,
        "operations other than build, step, save and load": case.does("overflow", "reload_params", "unfreeze"),
        "loads that are given twice": "again" in scenario.options,
        "comparisons of steps": kind == TRAINED and not own_master,
        "comparisons of dtypes": kind == TYPED,
        "comparisons of what a checkpoint holds": kind == WRITTEN and not case.is_shape,
        "comparisons over a save or a load": kind == KEPT and not counter,
    }
    NoExportError.unless_all_done(case.result, "TransformerEngine", wanted)


def _named(case: FailureCase) -> list[str]:
    """The modules of the model, without those that the failure is not about."""
    needed = tuple(param.fqn for param in case.spec.params)
    layers = LAYERS[case.scenario.model] if is_layers(case.scenario.model) else _blocks(case)
    paths = (
        [path for path in layers if any(name.startswith(f"{path}.") for name in needed)] if case.needs else [*layers]
    )
    message = case.result.error.message if case.focus.kind == RAISES and case.result.error else ""
    about = [path for path in paths if case.focus.fqn.startswith(f"{path}.") or f".{path}." in message]
    return about or paths


def _blocks(case: FailureCase) -> Mapping[str, ModuleSpec]:
    return {m.path: m for m in case.spec.modules if m.params}


def _flat(path: str) -> str:
    return path.replace(".", "_")


def _name(case: FailureCase, fqn: str) -> str:
    """The name in the script: a layer is an attribute of the model, whose parameters keep their names."""
    path = next((path for path in _named(case) if fqn.startswith(f"{path}.")), "")
    return _flat(path) + fqn.removeprefix(path)


def _stored_name(case: FailureCase, fqn: str) -> str:
    return f"model.{fqn}" if case.focus.role == "param" else f"optim.state.{fqn}.{case.focus.role}"


def _attribute(case: FailureCase, path: str, layer: Layer | None) -> str:
    scenario = case.scenario
    if layer is None:
        params = (f'"{p.name}": {tensor_call(case, p)}.cuda()' for p in _blocks(case)[path].params)
        return f"{_flat(path)} = nn.ParameterDict({{{', '.join(params)}}})"
    dtype = storage_dtype(scenario.dtype, case.spec.unique_params[0].spec)
    given = [*map(str, layer.sizes), *(f"{name}={value!r}".replace("'", '"') for name, value in layer.options.items())]
    if dtype != "fp32" and layer.kind != ATTENTION:
        given.append(f"{'dtype' if layer.kind in NORMS else 'params_dtype'}={TORCH_NAME[dtype]}")
    if case.ops[-1].mesh.tp > 1 and layer.kind not in NORMS:
        given += [f"{name}={value!r}".replace("'", '"') for name, value in layer.parallel.items()]
        given.append("**tp")
    if "meta" in scenario.options and layer.kind != ATTENTION:
        given.append('device="meta"')
    return f"{_flat(path)} = te.{layer.kind}({', '.join(given)})"


def _quantised(scenario: Scenario) -> str:
    """The recipe by which matrices are stored in FP8; empty for none."""
    found = next((option for option in QUANTISED if option in scenario.options), "")
    return RECIPES.get(found, "DelayedScaling()") if found else ""


def _build(case: FailureCase, values: Mapping[str, Any], layers: Mapping[str, Layer]) -> list[str]:
    scenario, mesh = case.scenario, case.ops[-1].mesh
    cut = mesh.tp > 1
    size = mesh.tp if len(case.parts) == 1 else 'mesh["tp"].size()'
    lines = [f"mesh = {mesh_call(case, 'cuda')}", "torch.manual_seed($number)"]
    lines += [f'tp = {{"tp_size": {size}, "tp_group": mesh["tp"].get_group()}}'] * cut
    made = "model = Model(tp)" if cut else "model = Model()"
    recipe = _quantised(scenario)
    lines += [f"with te.quantized_model_init(recipe=recipe.{recipe}):", f"    {made}"] if recipe else [made]
    if cut:
        lines += [
            "for layer in model.children():",
            '    if hasattr(layer, "set_device_mesh"):  # of pull request 2713',
            '        layer.set_device_mesh(mesh["tp"])',
        ]
    data = ("dp_replicate", "dp_shard") if mesh.dp_replicate > 1 else ("dp_shard",)
    part = ", ".join(f'"{name}"' for name in data)
    lines.append(f"fully_shard(model, mesh={f'mesh[{part}]' if cut else 'mesh'})")
    if "meta" in scenario.options:
        lines += ["for layer in model.children():", "    layer.reset_parameters()"]
    if not case.weights_alone and not (is_layers(scenario.model) and case.focus.op.kind == "build"):
        lines.append(f"optimizer = {_optimizer(case)}")
    return lines


def _optimizer(case: FailureCase) -> str:
    scenario, ask, policy = case.scenario, case.scenario.optimizer, case.scenario.dtype
    if not CONTRACT.fused(scenario):
        return optimizer_call(case, CLASSES, {}).replace("parameters", "model.parameters()")
    given = {"lr": repr(ask.lr), "weight_decay": repr(ask.weight_decay)}
    given |= {"adam_w_mode": "False"} if ask.kind == "adam" else {}
    given |= {"master_weights": "True"} if policy.master else {}
    stored = {
        "master_weight_dtype": policy.master,
        "exp_avg_dtype": policy.exp_avg,
        "exp_avg_sq_dtype": policy.exp_avg_sq,
    }
    given |= {name: TORCH_NAME[dtype] for name, dtype in stored.items() if dtype and dtype != "fp32"}
    given |= {"store_param_remainders": "True"} if CONTRACT.keeps_remainders(scenario) else {}
    given |= {"capturable": "True"} if "capturable" in scenario.options else {}
    params = groups_call(case, _name)
    if "capturable" in scenario.options:  # which is about a learning rate of a group's own
        params = f'[{{"params": {params}, "lr": {ask.lr!r}}}]'
    return f"FusedAdam({params}, {', '.join(f'{name}={value}' for name, value in given.items())})"


def _step(case: FailureCase) -> list[str]:
    backward = "model().backward()"
    if CALIBRATING in case.scenario.options:
        backward = f"with te.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):\n    {backward}"
    return [backward, "optimizer.step()", "optimizer.zero_grad()"]


def _checkpoint(case: FailureCase) -> dict[str, str]:
    plan, given = checkpoint_plan(case.scenario.checkpoint), ""
    if plan.form == "full":
        given = ", options=StateDictOptions(full_state_dict=True)"
    weights = f"get_model_state_dict(model{given})"
    strict = ""
    if NO_EXTRA_STATE in case.scenario.options:
        weights = f'{{name: t for name, t in {weights}.items() if not name.endswith("_extra_state")}}'
        strict = given.replace("True)", "True, strict=False)") or ", options=StateDictOptions(strict=False)"
    states = [f'state = {{"model": {weights}}}']
    if not case.weights_alone:
        states.append(f'state["optim"] = get_optimizer_state_dict(model, optimizer{given})')
    put = [f'set_model_state_dict(model, state["model"]{strict or given})']
    if not case.weights_alone:
        put.append(f'set_optimizer_state_dict(model, optimizer, state["optim"]{given})')
    save = [*states, "dcp.save(state, checkpoint_id=CHECKPOINT)"]
    load = [*states, "dcp.load(state, checkpoint_id=CHECKPOINT)", *put]
    wrapped = {
        "except": "CheckpointException",
        "unwrap": "error = next(iter(error.failures.values()))[0]  # the first rank's",
    }
    if plan.form == "full":
        save = [*states, "if dist.get_rank() == 0:", "    torch.save(state, CHECKPOINT)", "dist.barrier()"]
        load = ["state = torch.load(CHECKPOINT)", *put]
    fails_there = case.focus.op.kind in ("save", "load") and plan.form != "full"
    return {
        **(wrapped if fails_there else {}), "save": "\n".join(save), "load": "\n".join(load),
        "load_model_only": "\n".join([*load[:-1]] if not case.weights_alone else load),
    }  # fmt: skip
