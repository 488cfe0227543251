"""How a failure of DeepSpeed becomes a script: `deepspeed.initialize`, the engine's step, and its checkpoints. Values
for the template `deepspeed.py.j2`. No torch.

A script runs on the library's own accelerator for CPUs, so that nothing has to stand in for a GPU.
"""

from __future__ import annotations

from typing import Any

from shardproof.export.case import KEPT, TRAINED, TYPED, WRITTEN, FailureCase, NoExportError
from shardproof.export.model import TORCH_NAME, model_values, odd_part, optimizer_call
from shardproof.export.script import Draft
from shardproof.models import storage_dtype
from shardproof.systems.deepspeed import export_own
from shardproof.systems.deepspeed.accepts import NO_OPTIMIZER, OFFLOADS, STAGES
from shardproof.systems.deepspeed.export_engine import INITIALIZE, engine_config, start_lines
from shardproof.systems.deepspeed.flat import ROUND_ROBIN

CLASSES = {"sgd": "torch.optim.SGD", "adam": "torch.optim.Adam", "adamw": "torch.optim.AdamW"}
SETTINGS = ("lr", "weight_decay")
"""Settings of param groups that a script compares."""
STATE_KEYS = {"momentum": "momentum_buffer"}


def draft_script(case: FailureCase) -> Draft:
    """The draft of a case.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    scenario, model = case.scenario, model_values(case)
    idle = _idle(case)
    own = export_own.draft_own(case)
    if own is not None:
        return own
    case.require_comparable()
    _require(case, model, idle)
    exact = case.focus.kind in (TRAINED, WRITTEN)
    values = {
        **model,
        "idle": idle if exact else {},
        "odd": odd_part(case.ops[-1].mesh.dp * scenario.microbatches),
        "config": engine_config(scenario),
        "optimizer": optimizer_call(case, CLASSES, {"nesterov": True} if scenario.optimizer.nesterov else {}),
        "exact": exact,
        "stepping": case.does("step"),
        "model_call": _model_call(model, idle, exact=exact),
        "tp_cut": False,
        "dp": case.ops[-1].mesh.dp,
        "stage": STAGES[scenario.sharding],
        "fp16": scenario.dtype.storage == "fp16",
        "count": scenario.microbatches,
        "state_key": STATE_KEYS.get(case.focus.role, case.focus.role),
        "stored": TORCH_NAME[storage_dtype(scenario.dtype, case.spec.unique_params[0].spec)],
    }
    value = "read(model, optimizer)"
    if case.focus.kind == WRITTEN:  # what the library reads is found by the map that may be what is wrong
        value = f"plain({case.focus.op.iteration})"
    calls = _calls(case, values)
    if case.focus.setting:
        calls |= _settings(case)
        value = f'[group["{case.focus.setting}"] for group in optimizer.param_groups]'
    library = f"deepspeed {case.result.version}"
    return Draft("shardproof.systems.deepspeed", "deepspeed.py.j2", calls, value, values, library)


def _settings(case: FailureCase) -> dict[str, str]:
    """What is compared of the param groups after a load: one setting of all of them."""
    name, ask = case.focus.setting, case.scenario.optimizer
    usual = ask.lr if name == "lr" else ask.weight_decay
    expected = [own.get(name, usual) for own, _ in model_values(case)["groups"]]
    return {"subject": f"{name} of the param groups after the load", "expected": repr(expected)}


def _require(case: FailureCase, model: dict[str, Any], idle: dict[str, str]) -> None:
    scenario, ask, kind = case.scenario, case.scenario.optimizer, case.focus.kind
    computed = kind in (TRAINED, WRITTEN)
    wanted = {
        "settings of param groups": bool(case.focus.setting) and case.focus.setting not in SETTINGS,
        "a learning-rate schedule": ask.schedule != "none",
        "overflowing steps": case.does("overflow"),
        "refreshed masters": case.does("reload_params"),
        "gradient clipping in a comparison of steps": bool(ask.clip) and computed,
        "param groups of their own in a comparison of steps": bool(model["groups"]) and computed,
        "unused parameters beside used ones in a comparison of steps": bool(model["unused_names"]) and computed,
        "comparisons of dtypes": kind == TYPED,
        "comparisons of masters after a load of the model alone": kind == KEPT
        and case.focus.role == "master"
        and case.focus.op.kind == "load_model_only",
        "tied parameters": scenario.model == "tied",
        "parameters that rest in a script without a comparison": bool(idle) and not computed,
        f"comparisons of what a checkpoint of the format {scenario.checkpoint} holds": kind == WRITTEN
        and scenario.checkpoint != "universal",
        "comparisons of step counters in a checkpoint": kind == WRITTEN and case.focus.role == "step",
        "comparisons of masters and moments under round_robin_gradients": ROUND_ROBIN in scenario.options
        and case.focus.role != "param"
        and kind in (TRAINED, KEPT),
    }
    NoExportError.unless_all_done(case.result, "DeepSpeed", wanted)


def _idle(case: FailureCase) -> dict[str, str]:
    """Block → when a forward uses it, as an expression of `batch`; blocks that every forward uses are not there."""
    count = case.scenario.microbatches
    told = {
        "odd": f"batch // {count} % 2 == 0" if count > 1 else "batch % 2 == 0",
        "first": f"batch % {count} > 0" if count > 1 else "False",
    }
    found = {}
    for module in case.spec.modules:
        if module.params and not any(p.used for p in module.params):
            found[module.path.replace(".", "_")] = "False"
        elif any(p.idle for p in module.params):
            found[module.path.replace(".", "_")] = told[next(p.idle for p in module.params if p.idle)]
    return found


def _model_call(model: dict[str, Any], idle: dict[str, str], *, exact: bool) -> str:
    name = "Model" if idle or model["unused_blocks"] else "nn.Sequential"
    block = "Block(path, shapes)" if exact or model["islands"] else "Block(shapes)"
    return f"{name}(OrderedDict((path, {block}) for path, shapes in SHAPES.items()))"


def _calls(case: FailureCase, values: dict[str, Any]) -> dict[str, str]:
    """The DeepSpeed calls for each kind of operation, such as `model.save_checkpoint(…)` for a save."""
    scenario = case.scenario
    universal = scenario.checkpoint == "universal"
    alone = "load_module_only=True"
    if NO_OPTIMIZER in scenario.options:
        alone = "load_optimizer_states=False, load_lr_scheduler_states=False"
    saved = '"ranks"' if universal else "str($checkpoint)" if case.reads_earlier else '"saved"'
    tag = '"universal"' if universal else saved
    save = [f"model.save_checkpoint(CHECKPOINT, tag={saved})"]
    if universal:
        save += ["if dist.get_rank() == 0:", "    convert()", "dist.barrier()"]
    traceback = case.result.error.traceback if case.result.error else ""
    converting = {"works": "ds_to_universal converts the checkpoint"} if "ds_to_universal.py" in traceback else {}
    refused = {"except": "pickle.UnpicklingError"} if case.focus.error.endswith("UnpicklingError") else {}
    return refused | {
        "start": "\n".join(start_lines(case)),
        "build": "\n".join(_build(values)),
        "step": "\n".join(_step(case)),
        "save": "\n".join(save),
        **converting,
        "load": f"model.load_checkpoint(CHECKPOINT, tag={tag})",
        "load_model_only": f"model.load_checkpoint(CHECKPOINT, tag={tag}, {alone})",
    }


def _build(values: dict[str, Any]) -> list[str]:
    given = "parameters" if values["frozen"] else "model.parameters()"
    lines = ["model = make_model($number)"]
    lines += [f"model.{block}.requires_grad_(False)" for block in values["frozen"]]
    if values["groups"]:
        lines.append(
            'parameters = [{**own, "params": [model.get_parameter(n) for n in names]} for own, names in GROUPS]'
        )
        given = "parameters"
    elif values["frozen"]:
        lines.append("parameters = [p for p in model.parameters() if p.requires_grad]")
    return [
        *lines,
        f"optimizer = {values['optimizer'].replace('parameters', given)}",
        *INITIALIZE,
    ]


def _step(case: FailureCase) -> list[str]:
    count = case.scenario.microbatches
    ones = "torch.ones(1, requires_grad=True)"
    exact, around = case.focus.kind in (TRAINED, WRITTEN), []
    if OFFLOADS in case.scenario.options:
        kinds = "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum"
        some = f"[{kinds}.lp_params]" if STAGES[case.scenario.sharding] == 3 else ""
        around = [f"model.offload_states({some})", "model.reload_states()"]
    if count == 1:
        loss = f"model(({ones}, $number))[0].sum()" if exact else f"model({ones}).sum()"
        return [f"model.backward({loss})", "model.step()", *around]
    batches = f"range({count} * $number, {count} * $number + {count})" if exact else f"range({count})"
    loss = f"model(({ones}, batch))[0].sum()" if exact else f"model({ones}).sum()"
    every = f"for {'batch' if exact else '_'} in {batches}:"
    return [every, f"    model.backward({loss})", "    model.step()", *around]
