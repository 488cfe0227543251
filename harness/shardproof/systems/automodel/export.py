"""How a failure of NeMo Automodel becomes a script: a small checkpoint as the hub has it, `from_pretrained` of a model
class of the script's own, FSDP2 by the library's strategy, and its checkpointer. Values for the template
`automodel.py.j2`. No torch.

While it loads, the library puts a model on the current CUDA device. Without a GPU the module `gpu_on_cpu.py` beside the
script answers with the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardproof.export.case import KEPT, RAISES, TRAINED, TYPED, WRITTEN, FailureCase, NoExportError
from shardproof.export.model import TORCH_NAME, optimizer_call, start
from shardproof.export.script import Draft, fill
from shardproof.mechanisms.fsdp2.export import WRAPPED
from shardproof.models import NamedParam
from shardproof.scenario import Scenario
from shardproof.systems.automodel import export_recipe
from shardproof.systems.automodel.models import REAL, REAL_LLAMA
from shardproof.systems.automodel.pretrained import (
    BY_DTYPE,
    CONSOLIDATED,
    PINNED,
    PINNED_SOFT,
    RECIPES,
    REPLICATED,
    file_dtype,
    requested,
)
from shardproof.versions import before

HOME = "shardproof.systems.automodel"
SHIM = "gpu_on_cpu.py"
CLASSES = {"sgd": "torch.optim.SGD", "adam": "torch.optim.Adam", "adamw": "torch.optim.AdamW"}
STATE_KEYS = {"momentum": "momentum_buffer"}
REGISTERED = (
    'AutoConfig.register("tiny", TinyConfig)',
    "AutoModelForCausalLM.register(TinyConfig, TinyForCausalLM)",
)
LLAMAS = ("hf_llama", REAL_LLAMA)
"""Models of which transformers' own Llama of two layers is as good an example, where no forward runs."""


def draft_script(case: FailureCase) -> Draft:
    """The draft of a case.

    Raises:
        NoExportError: it uses what the template has no calls for.
    """
    recipe = export_recipe.draft_recipe_script(case)
    if recipe is not None:
        return recipe
    case = _seen(case)
    case.require_comparable()
    scenario, spec, version = case.scenario, case.spec, case.result.version
    cut = case.ops[-1].mesh.tp > 1
    kinds = (TYPED, KEPT, RAISES) if cut else (TYPED, KEPT)
    llama = scenario.model in LLAMAS and case.focus.kind in kinds and not case.does("step")
    _require(case, llama=llama)
    path, _, own = case.focus.fqn.rpartition(".")
    named = _named(case, path.rpartition(".")[0] + "." if cut and case.focus.kind == TYPED else "")
    if not named:
        raise NoExportError("scripts for Automodel do not do tensor parallelism of a parameter outside of a layer yet")
    lean = _lean(case, named)
    if lean:
        named, path = lean, ""
    dtypes = {p.fqn: file_dtype(scenario, p.spec) for p in named}
    bulk = min(dtypes.values())  # bf16 and fp16 come before fp32
    pins = sorted({p.spec.name for p in spec.params if p.spec.island})
    buffers = {} if len(named) < len(spec.unique_params) else _buffers(case)
    values: dict[str, Any] = {
        "llama": llama,
        "stepping": case.does("step"),
        "params": {p.spec.name: p.spec.shape for p in lean} if lean else _shapes(named),
        "flat": bool(lean),
        "file_dtype": TORCH_NAME[bulk],
        "file_islands": sorted({fqn.rpartition(".")[2] for fqn, name in dtypes.items() if name != bulk}),
        "buffers": buffers,
        "pinned": pins if PINNED in scenario.options else [],
        "pinned_soft": pins if PINNED_SOFT in scenario.options else [],
        "cut": cut,
        "by_dtype": BY_DTYPE in scenario.options,
        "owned_parallelizer": not before(version, "0.7.0"),
        "state_key": STATE_KEYS.get(case.focus.role, case.focus.role),
        "path": path,
        "own": own,
        "shim": SHIM.removesuffix(".py"),
        "sees": case.focus.role == "compute_param",
        "form": scenario.checkpoint,
    }
    calls = {
        "start": "\n".join([start(case, "gloo"), *([] if llama else REGISTERED)]),
        "build": "\n".join(_build(case, llama=llama)),
        "step": "model(torch.ones(1, requires_grad=True)).sum().backward()\noptimizer.step()\noptimizer.zero_grad()",
        **_checkpoint(),
        **(WRAPPED if cut and case.focus.kind == RAISES else {}),
    }
    value = "read(model)" if case.focus.role == "param" else "read(model, optimizer)"
    if lean:
        value = f"model.{own}.detach()"
        calls["expected"] = f'load_file(PRETRAINED + "/model.safetensors")["{own}"]  # what the file holds'
    if case.focus.kind == TYPED:
        kind = "buffer" if case.focus.role == "buffer" else "parameter"
        value = f'model.get_{kind}("{case.focus.fqn}").dtype'
        if case.focus.role == "compute_param":
            value = f'model.get_submodule("{path}").seen["{own}"]'
    if lean and case.focus.difference:  # which the script calls by its last name
        key = case.focus.difference.key._replace(fqn=own)
        case = replace(case, focus=replace(case.focus, difference=replace(case.focus.difference, key=key)))
    shims = {SHIM: fill(HOME, f"{SHIM}.j2")}
    return Draft(HOME, "automodel.py.j2", calls, value, values, f"nemo-automodel {version}", shims, case=case)


def _seen(case: FailureCase) -> FailureCase:
    """The dtype that a forward sees, where a step that it takes differs by that."""
    seen = [d for d in case.first_ones if (d.key.role, d.kind) == ("compute_param", "dtype")]
    if case.focus.kind != TRAINED or case.focus.op.kind != "step" or not seen:
        return case
    return replace(case, focus=replace(case.focus, kind=TYPED, difference=min(seen, key=lambda d: d.key.fqn)))


def _lean(case: FailureCase, named: tuple[NamedParam, ...]) -> tuple[NamedParam, ...]:
    """Of the parameters, the one whose value is wrong after a build on one rank, and one of another dtype in the file;
    none where the failure may need the whole model."""
    built = case.focus.kind == TRAINED and case.focus.op.kind == "build" and case.focus.role == "param"
    if case.whole or not built or case.ops[-1].mesh.world > 1 or any(p.spec.trainable == "no" for p in named):
        return ()
    own = next(p for p in named if p.fqn == case.focus.fqn)
    kind = file_dtype(case.scenario, own.spec)
    other = next((p for p in named if file_dtype(case.scenario, p.spec) != kind and p.spec.name != own.spec.name), None)
    return (other, own) if other else ()


def _require(case: FailureCase, *, llama: bool) -> None:
    scenario, ask = case.scenario, case.scenario.optimizer
    lacks = {
        "the real models of transformers and Automodel": scenario.model in REAL and not llama,
        "settings of param groups": bool(case.focus.setting),
        "tensor parallelism in comparisons of values": any(op.mesh.tp > 1 for op in case.ops)
        and case.focus.kind not in (TYPED, RAISES),
        "the texts of recipes": any(option in scenario.options for option in RECIPES),
        "consolidated exports": CONSOLIDATED in scenario.options,
        "a tower that is replicated": REPLICATED in scenario.options,
        "a learning-rate schedule": ask.schedule != "none",
        "gradient clipping": bool(ask.clip),
        "param groups of their own": len(case.spec.groups) > 1 and ask.groups == "model",
        "microbatches": scenario.microbatches > 1,
        "tied parameters": any(p.spec.tied_to for p in case.spec.params),
        "unused parameters": any(not p.spec.used for p in case.spec.params),
        "comparisons of steps": case.focus.kind == TRAINED and case.focus.op.kind != "build",
        "comparisons of what a checkpoint holds": case.focus.kind == WRITTEN,
        "another number of ranks for the load": len(case.parts) > 1,
    }
    NoExportError.unless_all_done(case.result, "Automodel", lacks)


def _buffers(case: FailureCase) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Name → shape, and whether the file has it."""
    return {name: (b.shape, b.persistent) for name, b in case.spec.buffers() if not b.dtype.startswith("int")}


def _named(case: FailureCase, prefix: str) -> tuple[NamedParam, ...]:
    """The parameters of the model whose names begin so."""
    return tuple(p for p in case.spec.unique_params if p.fqn.startswith(prefix))


def _shapes(params: tuple[NamedParam, ...]) -> dict[str, tuple[int, ...]]:
    return {p.fqn: p.spec.shape for p in params}


def _build(case: FailureCase, *, llama: bool) -> list[str]:
    """The checkpoint of the hub, the library's loader, and the optimizer."""
    scenario, mesh = case.scenario, case.ops[-1].mesh
    asked = requested(scenario)
    several = mesh.world > 1
    lines = ["if dist.get_rank() == 0:", "    write_pretrained($number)", "dist.barrier()"] if several else []
    lines = lines or ["write_pretrained($number)"]
    lines += ["shard_by_dtype()"] if BY_DTYPE in scenario.options else []
    stages = {"param_dtype": scenario.dtype.param, "reduce_dtype": scenario.dtype.reduce}
    stages["output_dtype"] = scenario.dtype.output
    asked_of = ", ".join(f"{name}={TORCH_NAME[value]}" for name, value in stages.items() if value)
    lines.append(f"policy = MixedPrecisionPolicy({asked_of})")
    lines += _plan(case, llama=llama)
    lines.append(f"config = FSDP2Config({', '.join(_strategy(scenario, case.result.version, cut=mesh.tp > 1))})")
    sizes = f"dp_size={mesh.dp}" + (f", dp_replicate_size={mesh.dp_replicate}" if mesh.dp_replicate > 1 else "")
    sizes += f", tp_size={mesh.tp}" if mesh.tp > 1 else ""
    if before(case.result.version, "0.5.0"):
        lines.append(f"mesh, moe_mesh = create_device_mesh(config, {sizes}, world_size={mesh.world})")
        world = "device_mesh=mesh, moe_mesh=moe_mesh, distributed_config=config"
    else:
        lines.append(f"setup = DistributedSetup.build(config, ParallelismSizes({sizes}), world_size={mesh.world})")
        world = "distributed_setup=setup"
    dtype = TORCH_NAME.get(asked, f'"{asked}"')
    if any(p.spec.trainable == "no" for p in case.spec.params):
        world += ', freeze_config={"freeze_vision_tower": True}'
    options = f"torch_dtype={dtype}, use_liger_kernel=False, use_sdpa_patching=False,"
    world += ", force_hf=True" if llama else ""
    lines += [
        "model = NeMoAutoModelForCausalLM.from_pretrained(",
        f"    PRETRAINED, {options}",
        f'    attn_implementation="sdpa", {world},',
        ")",
    ]
    if case.does("step", "save", "load"):
        trained = "[p for p in model.parameters() if p.requires_grad]"
        lines.append(f"optimizer = {optimizer_call(case, CLASSES, {}).replace('parameters', trained)}")
    return lines


def _plan(case: FailureCase, *, llama: bool) -> list[str]:
    """The tensor-parallel plan: of a Llama its last layer, of the script's own model every module that a rank has a
    part of, or that of the parameter whose dtype is compared."""
    if case.ops[-1].mesh.tp == 1:
        return []
    if llama:
        return ['plan = {"lm_head": ColwiseParallel()}  # 7 rows, which neither 2 nor 3 divides']
    paths = tuple(m.path for m in case.spec.modules if any(p.tp_dim is not None for p in m.params))
    own = [path for path in paths if case.focus.kind != TYPED or path == case.focus.fqn.rpartition(".")[0]]
    return [f"plan = {{{', '.join(f'{path!r}: Cut()' for path in own)}}}".replace("'", '"')]


def _strategy(scenario: Scenario, version: str, *, cut: bool) -> list[str]:
    """The options of the library's FSDP2 strategy that the scenario asks for."""
    found = ["mp_policy=policy", *["tp_plan=plan"] * cut]
    if scenario.offload.fraction:
        found.append("offload_policy=CPUOffloadPolicy(pin_memory=False)")
    if before(version, "0.5.0"):
        found.append('backend="gloo"')
    if scenario.reshard_after_forward != "none":
        found.append(f"reshard_after_forward={scenario.reshard_after_forward == 'true'}")
    return found


def _checkpoint() -> dict[str, str]:
    save = [
        "keeper = checkpointer()",
        "keeper.save_model(model, CHECKPOINT)",
        "keeper.save_optimizer(optimizer, model, CHECKPOINT, None)",
    ]
    model_only = ["keeper = checkpointer()", 'keeper.load_model(model, CHECKPOINT + "/model")']
    load = [*model_only, "keeper.load_optimizer(optimizer, model, CHECKPOINT, None)"]
    return {"save": "\n".join(save), "load": "\n".join(load), "load_model_only": "\n".join(model_only)}
