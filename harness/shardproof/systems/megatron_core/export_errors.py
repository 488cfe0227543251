"""Loads that raise under DDP, as scripts of one parameter: scenes of `export_scene`. No torch.

An error needs neither right values nor other layers. So the script saves what it has just built and stepped, and loads
it into the same optimizer. Only where the second run asks for what the first one did not, such as another learning
rate, is it built twice.
"""

from __future__ import annotations

from shardproof.export.case import RAISES, FailureCase
from shardproof.export.script import Draft
from shardproof.mechanisms.megatron import export_calls as calls_of
from shardproof.mechanisms.megatron import export_groups as groups
from shardproof.mechanisms.megatron.export_calls import Store
from shardproof.oracle.contract import half_dtype
from shardproof.systems.megatron_core.export_scene import LR, Scene, build_lines, drafted, tensor

PLAIN = ("weight_decay", "clip_grad")
"""Options of an OptimizerConfig that no error of a load depends on."""

OF_RATES = ("KeyError: (None, ", "ValueError: Could not find parameter group with key (None, ")
"""How errors begin that come of another learning rate than the checkpoint's."""

OF_STATE = "KeyError: 'step'"
"""How an error begins that comes of what torch's Adam has in its state, and the fused ones have not."""

OF_NO_STATE = ("AssertionError", "state_dict")
"""The type of the error, and the function that raises it, which comes of an optimizer that has taken no step: a fresh
run that loads."""

FUSED = "multi_tensor"


def draft_error_script(case: FailureCase, store: Store) -> Draft | None:
    """A script that shows the error of a load with one parameter. None if the failure needs the general template."""
    scenario, error = case.scenario, case.result.error
    own = scenario.offload.fraction or scenario.expert_parallel > 1 or groups.scheduled(case) or groups.own_groups(case)
    plain = not own and scenario.model == "dense" and not scenario.options and not store.fully_parallel
    shown = case.focus.kind == RAISES and case.focus.op.kind == "load" and case.ops[-1].mesh.tp == 1 and not store.fsdp
    kinds = [op.kind for op in case.ops]
    stepped = "step" in kinds and "save" in kinds and kinds.index("step") < kinds.index("save")
    if case.whole or error is None:
        return None
    told = f"{error.type}: {error.message}"
    # torch's own may raise since it was just built, without state, but for an error that is of its state
    fresh = scenario.optimizer.impl != FUSED and _is_of_no_state(case)
    usable = scenario.optimizer.impl == FUSED or told.startswith(OF_STATE) or fresh
    if not (shown and plain and stepped and usable and len(case.parts) == 1):
        return None
    rates = told.startswith(OF_RATES)
    return drafted(_loaded(case, store, rates=rates, fresh=fresh), store)


def _is_of_no_state(case: FailureCase) -> bool:
    """Whether the error comes of an optimizer without state."""
    error, (kind, function) = case.result.error, OF_NO_STATE
    lines = error.traceback.splitlines() if error else []
    raised = [line for line in lines if "distrib_optimizer.py" in line]
    return bool(error and error.type == kind and raised and raised[-1].rstrip().endswith(f"in {function}"))


def _loaded(case: FailureCase, store: Store, *, rates: bool, fresh: bool = False) -> Scene:
    """A checkpoint that cannot be loaded.

    Args:
        rates: the second build asks for twice the learning rate. fresh: the second build has taken no step.
    """
    builds = [op for op in case.ops if op.kind == "build"]
    kept = {"step", "save", "load"}
    ops = [op for op in case.ops if op.kind in kept or op in (builds if rates or fresh else builds[:1])]
    steps = [op for op in ops if op.kind == "step"]
    asked = calls_of.optimizer(case.scenario, half_dtype(case.scenario.dtype))
    config = {name: value for name, value in asked.items() if name not in PLAIN}
    config["lr"] = f"{LR} if $number == 0 else {2 * LR}" if rates else repr(LR)
    made = ["model = MegatronModule(CONFIG)", f"model.weight = nn.Parameter({tensor(case, '4')})"]
    lines = [
        new for line in build_lines(case, store, config) for new in (made if line == "model = Model()" else [line])
    ]
    return Scene(
        case.only(tuple(op for op in ops if op not in steps[1:])),
        "",
        [],
        "",
        "",
        "",
        {
            "build": "\n".join(lines),
            "step": "model.module.weight.sum().backward()\noptimizer.step()",
        },
        fused=case.scenario.optimizer.kind != "sgd" and case.scenario.optimizer.impl == FUSED,
    )
