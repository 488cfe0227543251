"""How a failure of Megatron-FSDP becomes a script: `fully_shard_model`, `fully_shard_optimizer`, torch's loop and
distributed checkpoints. Values for the template `megatron_fsdp.py.j2`. No torch.

Where a step gives wrong values, the script's numbers are such that a reader works out what is right: every parameter
begins as 1, rank r's loss is r + 1 times the sum of all parameters, and SGD steps once with the mean of the gradients.
A script asks for `cuda`; without a GPU the module `gpu_on_cpu.py` beside
it gives the CPU that name, and runs TransformerEngine's Python, which the library imports, on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from shardproof.export.case import KEPT, OTHER, RAISES, TRAINED, TYPED, WRITTEN, FailureCase, NoExportError
from shardproof.export.model import TORCH_NAME, flat, optimizer_call, start, tensor_call
from shardproof.export.script import Draft
from shardproof.mechanisms.fsdp2.export import CLASSES, WRAPPED
from shardproof.mechanisms.fused_adam import PRECISION_AWARE
from shardproof.mechanisms.stand_ins import MODULE, gpu_on_cpu
from shardproof.models import ParamSpec
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.megatron_fsdp.accepts import STRATEGIES
from shardproof.systems.megatron_fsdp.contract import CONTRACT
from shardproof.versions import before

HOME = "shardproof.systems.megatron_fsdp"
LR = 0.125
STORED = "dcp.FileSystemReader(CHECKPOINT).read_metadata().state_dict_metadata"
"""The names that a checkpoint has."""
STATE_KEYS = {"momentum": "momentum_buffer", "master": "master_param"}


def draft_script(case: FailureCase) -> Draft:
    """The draft of a case.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    if _is_warned(case):
        return _warned(case)
    stale = _is_stale(case)
    case = _as_a_step(case) if stale else case
    case.require_comparable()
    scenario, mesh, focus = case.scenario, case.ops[-1].mesh, case.focus
    _require(case)
    if _is_uneven(case):
        return _uneven(case)
    if _is_empty(case):
        return _empty(case)
    stepped = _is_stepped(case)
    values = _values(case, stepped=stepped)
    calls = {
        **_begun(case),
        "step": "\n".join(_step(case)),
        **_checkpoint(),
        **(WRAPPED if focus.op.kind in ("save", "load", "load_model_only") else {}),
        "holds": f'any("{focus.role}" in name for name in {STORED})',
    }
    value = "step_of(model, optimizer)" if focus.role == "step" else "read(model, optimizer)"
    if _is_linear(case):
        value = f'optimizer.state[model.module.{flat(focus.fqn)}]["{focus.role}"].to_local().clone()'
    if stepped or focus.role == "param" or (focus.role == "master" and not CONTRACT.masters_in_state(scenario)):
        value = f"model.module.{flat(focus.fqn)}.detach().to_local()"
    if focus.kind == TRAINED:
        calls["expected"] = _expected(case) if stepped else "0.0"
        calls["speaker"] = str(next(iter(focus.difference.ranks if focus.difference else ()), 0))
    if stale:
        calls["subject"], value = "sum of the weights that the second forward computes with", _FORWARD
        calls["expected"] = f"{_size(case)} * {1 - LR * (mesh.dp + 1) / 2}  # what the first step has made of each"
    elif stepped:
        calls["subject"], value = f"{focus.fqn} after the step", f"{value}.unique().tolist()"
    elif _is_left_over(case):
        what = "largest momentum" if focus.role == "momentum" else f"whether FusedAdam has a master of {focus.fqn}"
        calls["subject"] = f"{what} right after fully_shard_optimizer"
        calls["expected"], value = ("0.0", "momentum(optimizer)") if focus.role == "momentum" else ("False", _MASTER)
        value = value.replace("NAME", flat(focus.fqn))
    return _drafted(case, calls, value, values)


def _drafted(case: FailureCase, calls: Mapping[str, str], value: str, values: Mapping[str, Any]) -> Draft:
    library = f"megatron-fsdp {case.result.version}"
    return Draft(HOME, "megatron_fsdp.py.j2", calls, value, values, library, gpu_on_cpu(extension=True), case=case)


def _values(case: FailureCase, *, stepped: bool) -> dict[str, Any]:
    """What the template needs to know."""
    focus = case.focus
    return {
        "stepping": case.does("step"),
        "stepped": stepped,
        "meta": "meta" in case.scenario.options,
        "tp_cut": case.ops[-1].mesh.tp > 1,
        "skipped": _skipped(case),
        "fqn": flat(focus.fqn),
        "state_key": STATE_KEYS.get(focus.role, focus.role),
        "shim": MODULE,
    }


def _begun(case: FailureCase) -> dict[str, str]:
    """The calls before the first step."""
    device = ['torch.cuda.set_device(int(os.environ["RANK"]))'] * (case.ops[-1].mesh.world > 1)
    error = case.result.error
    sharding = {"works": "the optimizer is sharded"} if error and "fully_shard_optimizer" in error.traceback else {}
    return {"start": "\n".join([*device, start(case, "nccl")]), "build": "\n".join(_build(case)), **sharding}


def _skipped(case: FailureCase) -> list[str]:
    """The blocks that no forward uses."""
    return [m.path.replace(".", "_") for m in case.spec.modules if m.params and not any(p.used for p in m.params)]


def _is_warned(case: FailureCase) -> bool:
    """Whether a step warns where nothing is wrong."""
    first = case.first
    return case.focus.kind == OTHER and case.focus.op.kind == "step" and bool(first and first.key.role == "warning")


def _warned(case: FailureCase) -> Draft:
    """The draft of a step that must not warn. What the library says of its own buffers, behind the first comma, is left
    out."""
    step = [
        "with warnings.catch_warnings(record=True) as said:",
        '    warnings.simplefilter("always")',
        *(f"    {line}" for line in _step(case)),
    ]
    calls = {
        **_begun(case),
        "step": "\n".join(step),
        "subject": "what Megatron-FSDP warns of in a step",
        "expected": "[]",
    }
    seen = 'sorted({str(w.message).partition(",")[0] for w in said if "megatron_fsdp" in w.filename})'
    return _drafted(case, calls, seen, {**_values(case, stepped=False), "fqn": ""})


def _is_uneven(case: FailureCase) -> bool:
    """Whether a checkpoint is refused since copies of a replicated parameter are cut in different ways."""
    error = case.result.error
    refused = case.focus.kind == RAISES and case.focus.op.kind == "save" and bool(error)
    return refused and not case.whole and "has overlapping chunks" in (error.message if error else "")


def _uneven(case: FailureCase) -> Draft:
    """The draft of a save of one block, before any step: of 3 rows one of two tensor-parallel ranks has 2, and behind
    them lies a parameter that both have."""
    mesh = Mesh(1, 2, 2)
    ops = {op.kind: replace(op, mesh=mesh) for op in reversed(case.ops) if op.kind in ("build", "save")}
    case = case.only((ops["build"], ops["save"]))
    weight = ParamSpec("weight", (3, 3), tp_dim=0)
    parameters = ", ".join(_parameter(case, p) for p in (weight, ParamSpec("bias", (6,))))
    build = [
        'mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_shard", "tp"))',
        *_made([f"block=Block({parameters})"], "nn.Sequential"),
        *_wrapped(_sharded(case)),
        "optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))",
    ]
    calls = {**_begun(case), **_checkpoint(), "build": "\n".join(build), **WRAPPED}
    return _drafted(case, calls, "None", {**_values(case, stepped=False), "fqn": ""})


def _is_empty(case: FailureCase) -> bool:
    """Whether a model cannot be wrapped, since a tensor-parallel rank has no column of a weight."""
    error, refused = case.result.error, case.focus.kind == RAISES and case.focus.op.kind == "build"
    return refused and not case.whole and bool(error and error.type == "ZeroDivisionError")


def _empty(case: FailureCase) -> Draft:
    """The draft of a model of one block: of 6 columns the last of four tensor-parallel ranks has none."""
    case = case.only((next(op for op in case.ops if op.kind == "build"),)).on_tensor_parallel_ranks()
    weight = ParamSpec("weight", (3, 6), tp_dim=1)
    parameters = ", ".join(_parameter(case, p) for p in (weight, ParamSpec("bias", (3,))))
    build = [
        f'mesh = init_device_mesh("cuda", (1, {case.ops[-1].mesh.tp}), mesh_dim_names=("dp_shard", "tp"))',
        *_made([f"block=Block({parameters})"], "nn.Sequential"),
        *_wrapped(_sharded(case)),
    ]
    calls = {**_begun(case), "build": "\n".join(build), "works": "the model is wrapped"}
    return _drafted(case, calls, "None", {**_values(case, stepped=False), "fqn": ""})


def _sharded(case: FailureCase) -> str:
    """The call that shards the model."""
    asked = ", ".join(f"{name}={value}" for name, value in _arguments(case).items())
    return f"model = fully_shard_model(model, {asked})"


_FORWARD = 'model(torch.zeros(1, device="cuda")).item()'
_MASTER = '"master_param" in optimizer.state[model.module.NAME]'


def _is_stale(case: FailureCase) -> bool:
    """Whether a forward computes with weights of before a step."""
    first = case.first
    return first is not None and first.key.role == "compute_param" and first.kind != "dtype" and case.does("step")


def _as_a_step(case: FailureCase) -> FailureCase:
    """The same up to the first step: the forward that follows shows it."""
    first = next(at for at, op in enumerate(case.ops) if op.kind == "step")
    difference = case.first and replace(case.first, key=case.first.key._replace(role="param"), kind="bits", ranks=())
    return replace(case, focus=replace(case.focus, kind=TRAINED, difference=difference)).only(case.ops[: first + 1])


def _is_left_over(case: FailureCase) -> bool:
    """Whether an optimizer has state right after it was made that it should not have."""
    extra = case.focus.difference is not None and case.focus.difference.kind == "extra"
    return extra and case.focus.op.kind == "build" and case.focus.role in ("momentum", "master")


def _size(case: FailureCase) -> int:
    """How many elements the blocks have that the script keeps."""
    own = next(m for m in case.spec.modules if any(f"{m.path}.{p.name}" == case.focus.fqn for p in m.params))
    return sum(prod(p.shape) for p in own.params)


def _expected(case: FailureCase) -> str:
    """What every element must be: all begin as 1, and the gradient is a rank's number, counted from 1."""
    mesh, spec = case.ops[-1].mesh, case.spec
    named = spec.param(case.focus.fqn).spec
    rate = LR * (spec.groups[named.group].lr_scale if case.scenario.optimizer.groups == "model" else 1)
    mean = (mesh.dp + 1) / 2
    times = case.scenario.microbatches * sum(op.kind == "step" for op in case.ops)
    often = f" * {times}" if times > 1 else ""
    return f"[1 - {rate} * {mean}{often}]  # everywhere: {mean} is the mean of the ranks' gradients"


def _is_stepped(case: FailureCase) -> bool:
    """Whether a step is compared with plain torch."""
    return case.focus.kind == TRAINED and case.focus.op.kind == "step"


def _require(case: FailureCase) -> None:
    scenario, ask, kind = case.scenario, case.scenario.optimizer, case.focus.kind
    wanted = {
        "settings of param groups": bool(case.focus.setting),
        "a learning-rate schedule": ask.schedule != "none",
        "overflowing steps": case.does("overflow"),
        "refreshed masters": case.does("reload_params"),
        "another number of ranks for the load": len(case.parts) > 1,
        "gradient clipping in a comparison": bool(ask.clip) and kind != RAISES,
        "tensor parallelism in a comparison": kind != RAISES and any(op.mesh.tp > 1 for op in case.ops),
        "comparisons of moments after a build": kind == TRAINED
        and not _is_stepped(case)
        and case.focus.role != "step"
        and not _is_left_over(case),
        "comparisons of dtypes": kind == TYPED,
        "comparisons of what a checkpoint holds": kind == WRITTEN and not case.is_missing,
        "FusedAdam in a comparison of steps": kind == TRAINED and CONTRACT.fused(scenario) and not _is_left_over(case),
        "comparisons of step counters over a save or a load": kind == KEPT and case.focus.role == "step",
        "tied parameters in a comparison": kind != RAISES and scenario.model == "tied",
        "unused parameters": any(not p.spec.used for p in case.spec.params),
    }
    NoExportError.unless_all_done(case.result, "Megatron-FSDP", wanted)


def _blocks(case: FailureCase) -> list[str]:
    """The blocks of the model, without those that a comparison is not about."""
    own = [m for m in case.spec.modules if any(f"{m.path}.{p.name}" == case.focus.fqn for p in m.params)]
    groups = "one_call" in case.scenario.options  # which need each other
    modules = own if own and not groups else [m for m in case.spec.modules if m.params]
    if _is_linear(case):
        rows, columns = case.spec.param(case.focus.fqn).spec.shape
        return [f"{own[0].path}=nn.Linear({columns}, {rows})"]
    return [
        f"{m.path.replace('.', '_')}=Block({', '.join(_parameter(case, p) for p in m.params if not p.tied_to)})"
        for m in modules
    ]


def _is_linear(case: FailureCase) -> bool:
    """Whether it is about what a checkpoint makes of FusedAdam's moments of a weight: a layer of torch's own shows
    it."""
    moment = case.focus.kind == KEPT and case.focus.role in ("exp_avg", "exp_avg_sq")
    if case.whole or not moment or not CONTRACT.fused(case.scenario) or case.ops[-1].mesh.tp > 1:
        return False
    own = case.spec.param(case.focus.fqn)
    return own.spec.name == "weight" and len(own.spec.shape) == 2 and not own.module.path.count(".")


def _parameter(case: FailureCase, p: ParamSpec) -> str:
    made = "torch.ones" if _is_stepped(case) or case.focus.kind == RAISES else "torch.randn"
    value = tensor_call(case, p, made)
    if case.ops[-1].mesh.tp > 1:
        place = "Replicate()" if p.tp_dim is None else f"Shard({p.tp_dim})"
        value = f'distribute_tensor({value}, mesh["tp"], [{place}])'
    return f"{p.name}={value}"


def _frozen(case: FailureCase) -> list[str]:
    blocks = [m.path for m in case.spec.modules if m.params and all(p.trainable != "yes" for p in m.params)]
    return [f"model.{path.replace('.', '_')}.requires_grad_(False)" for path in blocks]


def _groups(case: FailureCase) -> str:
    """The first argument of an optimizer before sharding."""
    spec, ask = case.spec, case.scenario.optimizer
    if ask.groups == "one" or len(spec.groups) == 1 or "one_call" not in case.scenario.options:
        return "model.parameters()"
    found = []
    for index, group in enumerate(spec.groups):
        params = ", ".join(f"model.{flat(p.fqn)}" for p in spec.unique_params if p.spec.group == index)
        found.append(f'{{"params": [{params}]' + (f', "lr": {LR * group.lr_scale}}}' if group.lr_scale != 1 else "}"))
    return f"[{', '.join(found)}]"


def _dims(scenario: Scenario, mesh: Mesh) -> dict[str, int]:
    """The dims of the mesh. The library wants one for tensor parallelism also where its size is 1."""
    sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    tp = "no_tp_dim" not in scenario.options
    return {n: size for n, size in sizes.items() if size > 1 or n == "dp_shard" or (n == "tp" and tp)}


def _build(case: FailureCase) -> list[str]:
    scenario, mesh, ask = case.scenario, case.ops[-1].mesh, case.scenario.optimizer
    dims = _dims(scenario, mesh)
    names = ", ".join(f'"{name}"' for name in dims) + ("," if len(dims) == 1 else "")
    sizes = ", ".join(map(str, dims.values())) + ("," if len(dims) == 1 else "")
    lines = [f'mesh = init_device_mesh("cuda", ({sizes}), mesh_dim_names=({names}))']
    made = _made(_blocks(case), "Model" if _skipped(case) else "nn.Sequential")
    if "meta" in scenario.options:
        made = ['with torch.device("meta"):', *(f"    {line}" for line in made)]
    elif any("randn" in line or "Linear" in line for line in made):
        lines.append("torch.manual_seed($number)")
    lines += [*made, *_frozen(case)]
    lines += [f"model.{flat(p.fqn)} = model.{flat(p.spec.tied_to)}" for p in case.spec.params if p.spec.tied_to]
    asked = ", ".join(f"{name}={value}" for name, value in _arguments(case).items())
    optimizer = f"optimizer = {_optimizer(case)}"
    if "one_call" in scenario.options:
        return [*lines, optimizer, *_wrapped(f"model, optimizer = fully_shard(model, optimizer, {asked})")]
    lines += [
        *_wrapped(_sharded(case)),
        optimizer,
        "optimizer = fully_shard_optimizer(optimizer)",
    ]
    if ask.loss_scale:
        lines.append(f'scaler = torch.amp.GradScaler("cuda", init_scale={ask.loss_scale!r})')
    return lines


def _made(blocks: list[str], name: str) -> list[str]:
    line = f"model = {name}(OrderedDict({', '.join(blocks)}))"
    if len(line) <= 112:
        return [line]
    return [f"model = {name}(OrderedDict(", *(one for block in blocks for one in _spread(block)), "))"]


def _spread(block: str) -> list[str]:
    """An argument that makes a block, with each of its parameters in a line of its own where it is long."""
    if len(block) <= 108 or "=Block(" not in block:
        return [f"    {block},"]
    head, _, rest = block.partition("(")
    parameters = re.split(r"(?<=\)), (?=\w+=)", rest.removesuffix(")"))  # each value is a call
    return [f"    {head}(", *(f"        {one}," for one in parameters), "    ),"]


def _wrapped(line: str) -> list[str]:
    """A call, with its arguments in lines of their own where it is long."""
    if len(line) <= 116:
        return [line]
    head, _, rest = line.partition("(")
    lines, row = [f"{head}("], "   "
    for argument in rest.removesuffix(")").split(", "):
        if len(row) + len(argument) > 105:
            lines.append(row)
            row = "   "
        row += f" {argument},"
    return [*lines, row, ")"]


def _arguments(case: FailureCase) -> dict[str, str]:
    """The arguments of `fully_shard_model` that differ from the defaults, spelled as in the release under test."""
    scenario, options, mesh = case.scenario, case.scenario.options, case.ops[-1].mesh
    hybrid = mesh.dp_replicate > 1
    given = {"device_mesh": "mesh", "dp_shard_dim": '"dp_shard"'}
    if hybrid:
        given |= {"dp_outer_dim": '"dp_replicate"'}
        given |= {
            "hybrid_fsdp_group": 'mesh["dp_replicate"\x1f"dp_shard"]._flatten("dp").get_group()'.replace("\x1f", ",")
        }
    given |= {} if "no_tp_dim" in options else {"tp_dim": '"tp"'}
    given |= {"fsdp_unit_modules": "[nn.Linear]" if _is_linear(case) else "[Block]"}
    strategy = STRATEGIES[scenario.sharding]
    given |= {} if strategy == "optim_grads_params" else {"zero_dp_strategy": f'"{strategy}"'}
    words = {
        "outer_optim": ("outer_dp_sharding_strategy", '"optim"'),
        "no_overlap_reduce": ("overlap_grad_reduce", "False"),
        "no_overlap_gather": ("overlap_param_gather", "False"),
        "average_in_collective": ("average_in_collective", "True"),
        "fine_grained_gather": ("enable_fine_grained_param_gather", "True"),
        "meta": ("init_model_with_meta_device", "True"),
    }
    given |= {name: value for word, (name, value) in words.items() if word in options}
    given |= {"sync_model_each_microbatch": "False"} if _waits(scenario) else {}
    given |= {"use_decoupled_grad": "True"} if CONTRACT.reads_decoupled(scenario) else {}
    return given | _policy(case)


def _policy(case: FailureCase) -> dict[str, str]:
    scenario, dtype = case.scenario, case.scenario.dtype
    master = dtype.master or ("fp32" if dtype.storage == "fp32" else None)
    main = None if {"no_main_params", PRECISION_AWARE} & {*scenario.options} else master
    if before(case.result.version, "0.4.0"):
        reduce = {"grad_reduce_in_fp32": "True"} if dtype.reduce == "fp32" else {}
        return reduce | ({} if main == "fp32" else {"preserve_fp32_weights": "False"})
    asked = {} if main == "fp32" else {"main_params_dtype": TORCH_NAME[main] if main else "None"}
    asked |= {"main_grads_dtype": TORCH_NAME[dtype.reduce]} if dtype.reduce else {}
    if not asked:
        return {}
    policy = ",".join(f"{name}={value}" for name, value in asked.items())
    return {"mixed_precision_policy": f"MixedPrecisionPolicy({policy})"}


def _waits(scenario: Scenario) -> bool:
    """Whether gradients are synchronised after the last microbatch only."""
    return scenario.microbatches > 1 and scenario.grad_sync != "every"


def _optimizer(case: FailureCase) -> str:
    scenario, ask, policy = case.scenario, case.scenario.optimizer, case.scenario.dtype
    parameters = _groups(case)
    if _is_stepped(case):
        return f"torch.optim.SGD({parameters}, lr={LR})"
    if not CONTRACT.fused(scenario):
        neutral = {"weight_decay": 0.0} if "neutral_start" in scenario.options else {}
        return optimizer_call(case, CLASSES, neutral).replace("parameters", parameters)
    given = {"lr": repr(ask.lr), "weight_decay": repr(ask.weight_decay)}
    given |= {"adam_w_mode": "False"} if ask.kind == "adam" else {}
    given |= {"use_decoupled_grad": "True"} if CONTRACT.reads_decoupled(scenario) else {}
    if PRECISION_AWARE in scenario.options and policy.master:
        given |= {"master_weights": "True", "store_param_remainders": "True"}
    stored = {"exp_avg_dtype": policy.exp_avg, "exp_avg_sq_dtype": policy.exp_avg_sq}
    given |= {name: TORCH_NAME[dtype] for name, dtype in stored.items() if dtype and dtype != "fp32"}
    return f"FusedAdam({parameters}, {', '.join(f'{name}={value}' for name, value in given.items())})"


def _step(case: FailureCase) -> list[str]:
    scenario, count = case.scenario, case.scenario.microbatches
    loss = 'model(torch.ones(1, device="cuda", requires_grad=True)).sum()'
    if _is_linear(case):
        rows, columns = case.spec.param(case.focus.fqn).spec.shape
        output = f'model(torch.ones({columns}, device="cuda"))'
        loss = f'({output} * torch.arange(1.0, {rows + 1}.0, device="cuda")).sum()'  # each row has its own gradient
    if _is_stepped(case):
        loss = f"({loss} * (dist.get_rank() + 1))"
    scaled = bool(scenario.optimizer.loss_scale)
    backward = f"scaler.scale({loss}).backward()" if scaled else f"{loss}.backward()"
    lines = [backward]
    if _waits(scenario):
        first = [f"    {backward}"] if count == 2 else [f"    for _ in range({count - 1}):", f"        {backward}"]
        lines = ["with model.no_sync():", *first, backward, "model.finish_grad_sync()"]
    elif count > 1:
        lines = [f"for _ in range({count}):", f"    {backward}"]
    once = "" if "step_syncs" in scenario.options else "sync_grad_before_optimizer_step=False"
    if scenario.optimizer.clip:
        lines += ["scaler.unscale_(optimizer)"] * scaled
        lines.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {scenario.optimizer.clip!r})")
    syncs = once if scaled or scenario.optimizer.clip else ""
    if scaled:
        lines += [f"scaler.step({', '.join(filter(None, ('optimizer', syncs)))})", "scaler.update()"]
    else:
        lines.append(f"optimizer.step({syncs})")
    return [*lines, *(["optimizer.zero_grad()"] * (sum(op.kind == "step" for op in case.ops) > 1))]


def _checkpoint() -> dict[str, str]:
    state = 'state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
    put = ['model.load_state_dict(state["model"], strict=False)', 'optimizer.load_state_dict(state["optimizer"])']
    weights = ['state = {"model": model.state_dict()}', "dcp.load(state, checkpoint_id=CHECKPOINT)", put[0]]
    return {
        "save": f"{state}\ndcp.save(state, checkpoint_id=CHECKPOINT)",
        "load": "\n".join([state, "dcp.load(state, checkpoint_id=CHECKPOINT)", *put]),
        "load_model_only": "\n".join(weights),
    }
