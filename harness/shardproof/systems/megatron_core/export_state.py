"""Failures of the optimizer's own state that its attributes show: who steps the device's part, what counts its steps,
and which parameters it has after a load. Scenes of `export_scene`. No torch."""

from __future__ import annotations

from dataclasses import replace

from shardproof.export.case import FailureCase, case_of
from shardproof.export.script import Draft
from shardproof.mechanisms.megatron import export_calls as calls_of
from shardproof.mechanisms.megatron import export_groups as groups
from shardproof.mechanisms.megatron.export_calls import Store
from shardproof.oracle.contract import half_dtype
from shardproof.systems.megatron_core.export_scene import Scene, adam, build_lines, drafted, tensor

HYBRID = "optimizer.chained_optimizers[0].optimizer"
SIZE = "8"


def draft_state_script(case: FailureCase, store: Store) -> Draft | None:
    """A script that shows a failure of the optimizer's state by reading the optimizer's attributes. None if the failure
    needs the general template."""
    first, scenario = case.first, case.scenario
    if first is None or store.fsdp or case.ops[-1].mesh.world > 1:
        return None
    role, kind, failed = first.key.role, first.kind, case.focus.op.kind
    halved = 0 < scenario.offload.fraction < 1
    if halved and failed == "step" and "torch_offload" in scenario.options:
        return drafted(_who_steps(case, store), store)
    if halved and failed == "step" and case.does("load") and any(d.key.role == "step" for d in case.first_ones):
        return drafted(_counted(case, store), store)
    if halved and failed == "save" and role == "step" and kind == "missing" and store.form == "plain":
        return drafted(_stored_count(case, store), store)
    if failed == "load" and kind == "missing" and groups.own_groups(case) and store.form == "plain":
        return drafted(_dropped(case, store), store)
    if failed == "load" and role == "step" and store.form == "dp_reshardable" and scenario.optimizer.impl == "forloop":
        return drafted(_advanced(case, store), store)
    precise = calls_of.is_precise(scenario) and scenario.offload.fraction == 1
    if failed == "load" and case.focus.role == "param" and precise and store.form == "dp_zero":
        return drafted(_loaded(case, store), store)
    return None


def _two(case: FailureCase) -> list[str]:
    """The lines of two parameters, of which half of the offload takes one."""
    return [f"self.{name} = nn.Parameter({tensor(case, SIZE)})" for name in ("a", "b")]


def _config(case: FailureCase) -> dict[str, str]:
    return calls_of.optimizer(case.scenario, half_dtype(case.scenario.dtype))


def _who_steps(case: FailureCase, store: Store) -> Scene:
    """An optimizer of another class than was asked for."""
    case = case.until("build")
    return Scene(
        case,
        "Two parameters: one for the host, one for the device.",
        _two(case),
        "optimizer that steps the device's part",
        '"AdamW"  # torch.optim\'s',
        f"type({HYBRID}.gpu_optimizer).__name__",
        {"build": "\n".join(build_lines(case, store, _config(case)))},
        fused=True,
    )


def _counted(case: FailureCase, store: Store) -> Scene:
    """A counter of steps that stands still after a load."""
    steps = sum(op.kind == "step" for op in case.ops)
    return Scene(
        case,
        "Its loss is the sum of two parameters: one for the host, one for the device.",
        _two(case),
        f"step of the device's FusedAdam after {steps} steps, with a save and a load between them",
        str(steps),
        f'{HYBRID}.gpu_optimizer.param_groups[0]["step"]',
        {"build": "\n".join(build_lines(case, store, _config(case)))},
        forward="x + self.a.sum() + self.b.sum()",
        fused=True,
        precise=calls_of.is_precise(case.scenario),
    )


def _stored_count(case: FailureCase, store: Store) -> Scene:
    """A counter of steps that is in no file."""
    state = 'torch.load(CHECKPOINT, weights_only=False)["optimizer"]'
    return Scene(
        case,
        "Its loss is the sum of two parameters: one for the host, one for the device.",
        _two(case),
        "steps that the checkpoint's param groups have counted",
        "[1]",
        f'[group.get("step") for group in {state}["param_groups"]]',
        {"build": "\n".join(build_lines(case, store, _config(case)))},
        forward="x + self.a.sum() + self.b.sum()",
        fused=True,
    )


def _dropped(case: FailureCase, store: Store) -> Scene:
    """Parameters that are in no group of the optimizer after a load."""
    lr = case.scenario.optimizer.lr
    lines = build_lines(case, store, _config(case))
    made = [
        f'overrides = {{ParamKey(name="*b"): {{"max_lr": {lr / 4}}}}}',
        "optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides)",
    ]
    ops = tuple(op for op in case.ops if op.kind != "step")
    return Scene(
        case.only(ops),
        "Two parameters, each in a group of its own.",
        _two(case),
        "different parameters in the optimizer's groups after the load",
        "2",
        'len({id(p) for group in optimizer.param_groups for p in group["params"]})',
        {"build": "\n".join([*lines[:-1], *made])},
    )


def _advanced(case: FailureCase, store: Store) -> Scene:
    """A counter of steps that a step after a load advances by more than 1."""
    step, load = (next(op for op in case.ops if op.kind == kind) for kind in ("step", "load"))
    ops = {op.kind: op for op in reversed(case.ops)}
    lines = calls_of.checkpoint(store, case)["load"].splitlines()
    read = f'next(iter({HYBRID}.state.values()))["step"].item()'
    return Scene(
        case.only((ops["build"], step, ops["save"], load, replace(step, index=load.index + 1))),
        "Its loss is the sum of two parameters.",
        _two(case),
        "by how much one step after the load advances Adam's counter of steps",
        "1.0",
        f"{read} - loaded",
        {
            "build": "\n".join(build_lines(case, store, adam(case))),
            "step": 'model(torch.ones(1, device="cuda")).sum().backward()\noptimizer.step()',
            "load": "\n".join([*lines, f"loaded = {read}"]),
        },
        forward="x + self.a.sum() + self.b.sum()",
    )


def _loaded(case: FailureCase, store: Store) -> Scene:
    """A weight that is not the checkpoint's after a load: every build gives it another value."""
    case = case_of(case.result, whole=True)  # with the step that gives the optimizer its state
    lines = build_lines(case, store, {n: v for n, v in _config(case).items() if n not in ("weight_decay", "clip_grad")})
    return Scene(
        case,
        "Its loss is the sum of one parameter.",
        [f"self.weight = nn.Parameter({tensor(case, '4', 'torch.randn')})"],
        "weight after the load",
        'state["model"]["weight"].tolist()',
        "model.module.weight.tolist()",
        {"build": "\n".join(["torch.manual_seed($number)", *lines])},
        forward="x + self.weight.sum()",
        fused=True,
        precise=True,
    )
