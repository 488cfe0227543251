"""Failures of tensor and expert parallelism that one number shows: a gradient norm, and loss scales that should be
equal. Scenes of `export_scene`. No torch."""

from __future__ import annotations

from dataclasses import replace

from shardproof.export.case import FailureCase
from shardproof.export.script import Draft
from shardproof.mechanisms.megatron import export_calls as calls_of
from shardproof.mechanisms.megatron.export_calls import Store
from shardproof.oracle.contract import half_dtype
from shardproof.scenario import Mesh
from shardproof.systems.megatron_core.export_scene import Scene, adam, build_lines, drafted, step_lines, tensor


def draft_parallel_script(case: FailureCase, store: Store) -> Draft | None:
    """A script that shows a failure of tensor or expert parallelism by one number, such as a gradient norm. None if the
    failure needs the general template."""
    first = case.first
    if first is None or store.fsdp:
        return None
    if first.key.role == "norm" and "no_initialization" in case.scenario.options and case.ops[-1].mesh.tp > 1:
        return drafted(_norm(case, store), store)
    if first.key.role == "scaler" and case.scenario.expert_parallel > 1 and case.does("overflow"):
        return drafted(_scales(case, store), store)
    if (
        (first.key.role, first.kind) == ("step", "gap")
        and case.scenario.expert_parallel > 1
        and store.form == "dp_zero"
    ):
        return drafted(_steps(case, store), store)
    return None


def _norm(case: FailureCase, store: Store) -> Scene:
    """A norm that leaves out the shards of other ranks."""
    case, tp = case.until("step"), case.ops[-1].mesh.tp
    steps, config = step_lines(), {**adam(case), "clip_grad": repr(case.scenario.optimizer.clip)}
    return Scene(
        case,
        "Its loss is the sum of a tensor-parallel weight of 4 x 4.",
        [
            "self.linear = ColumnParallelLinear(4, 4, config=CONFIG, init_method=nn.init.ones_, bias=False)",
            "nn.init.ones_(self.linear.weight)  # since perform_initialization is off",
        ],
        "norm of a gradient of 16 ones",
        "4.0",
        "round(float(norm), 3)",
        {
            "build": "\n".join(build_lines(case, store, config)),
            "step": "\n".join([*steps[:-1], "_, norm, _ = optimizer.step()"]),
        },
        forward="x + self.linear.weight.sum()",
        config={"tensor_model_parallel_size": str(tp), "perform_initialization": "False"}
        | ({"params_dtype": "torch.bfloat16"} if half_dtype(case.scenario.dtype) == "bf16" else {}),
    )


def _steps(case: FailureCase, store: Store) -> Scene:
    """Steps that ranks have counted after a load, of which one had nothing of a param group when it was saved.

    Two ranks save: a dense parameter of 48 elements lies on the first of them alone. Four load: the second has a part.
    """
    case = case.until("load")
    saving, loading = Mesh(1, 2, 1), Mesh(1, 4, 1)
    ops = tuple(replace(op, mesh=saving if op in case.parts[0] else loading) for op in case.ops)
    lines = calls_of.checkpoint(store, case)["load"].splitlines()
    own = '[g.get("step") for o in optimizer.chained_optimizers for g in o.optimizer.param_groups if g["params"]]'
    gather = [f"steps = [None] * {loading.world}", f"own = {own}", "dist.all_gather_object(steps, own)"]
    return Scene(
        case.only(ops),
        "Its loss is the sum of a dense parameter and of one of an expert.",
        [
            f"self.dense = nn.Parameter({tensor(case, '48')})",
            f"self.expert = nn.Parameter({tensor(case, '4')})",
            "self.expert.allreduce = False  # marks a parameter of experts",
        ],
        "steps that each rank has counted for its param groups after the load",
        f"[[{sum(op.kind == 'step' for op in ops)}] * len(counted) for counted in steps]",
        "steps",
        {"build": "\n".join(build_lines(case, store, adam(case))), "load": "\n".join([*lines, *gather])},
        forward="self.dense.sum() + self.expert.sum() * x",
        fused=True,
    )


def _scales(case: FailureCase, store: Store) -> Scene:
    """Loss scales of two optimizers, of which one meets an overflow, and what that makes of an expert's gradient in the
    next step."""
    case = case.until("overflow")
    ops = tuple(op for op in case.ops if op.kind != "step")
    scale = case.scenario.optimizer.loss_scale or 1.0
    asked = calls_of.optimizer(case.scenario, half_dtype(case.scenario.dtype)) | {"hysteresis": "1"}
    kept = ("lr", "fp16", "params_dtype", "initial_loss_scale", "hysteresis")
    step = step_lines('model(torch.full((1,), x, device="cuda")).sum()')[:-1]
    lines = build_lines(case, store, {name: value for name, value in asked.items() if name in kept})
    return Scene(
        case.only(ops),
        "Its loss is the sum of a dense parameter, and of one of an expert times the input.",
        [
            f"self.dense = nn.Parameter({tensor(case, '4')})",
            f"self.expert = nn.Parameter({tensor(case, '4')})",
            "self.expert.allreduce = False  # marks a parameter of experts",
        ],
        "loss scales of the dense and the expert optimizer after an expert's gradient has overflowed, and an expert's "
        "gradient in the step after it",
        f"({[scale / 2] * 2!r}, {1 / case.ops[-1].mesh.dp})",
        "([dense.get_loss_scale().item(), expert.get_loss_scale().item()], expert.get_parameters()[0].grad[0].item())",
        {
            "build": "\n".join(lines).replace("use_distributed_optimizer=True", ""),  # which it does not depend on
            "overflow": "\n".join(
                [
                    'for x in (float("inf"), 1.0):  # a step that overflows, and one that does not',
                    *(f"    {line}" for line in step),
                    "    optimizer.prepare_grads()  # what optimizer.step() begins with",
                    "dense, expert = optimizer.chained_optimizers",
                ]
            ),
        },
        forward="self.dense.sum() + self.expert.sum() * x",
    )
