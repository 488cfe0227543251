"""Failures of DeepSpeed's loss scaling that one weight shows, as scripts with a model of their own: a step that is
skipped though nothing overflowed, and a gradient that is clipped by half of its norm. Values for `deepspeed_own.py.j2`.
No torch.

The weight has four elements, all 1, and so has its gradient, whose norm is 2.
"""

from __future__ import annotations

from typing import Any

from shardproof.export.case import TRAINED, FailureCase
from shardproof.export.script import Draft

HOME = "shardproof.systems.deepspeed"
LR, ELEMENTS = 0.125, 4


def draft_loss_scaling_script(case: FailureCase, config: dict[str, Any], calls: dict[str, str]) -> Draft | None:
    """The draft of a case that is one of these; None for any other.

    Args:
        config: the engine's configuration. calls: of any script of DeepSpeed, of which this one takes the start.
    """
    ask = case.scenario.optimizer
    if case.focus.kind != TRAINED or not ask.loss_scale or case.focus.op.kind != "step":
        return None
    if case.does("overflow"):
        first = next(op for op in case.ops if op.kind == "overflow")
        case = case.only((case.ops[0], *(op for op in case.ops if op.index >= first.index)))
        told = ("steps that were skipped, of which one overflowed", "1", "model.skipped_steps")
    elif ask.clip:
        told = _clipped(case)
    else:
        return None
    subject, expected, observed = told
    own = {
        "start": calls["start"],
        "state": "model",
        "build": "\n".join(
            [
                "model = Model()",
                f"optimizer = torch.optim.SGD(model.parameters(), lr={LR})",
                "model, _, _, _ = deepspeed.initialize(",
                "    model=model, optimizer=optimizer, config=CONFIG, dist_init_required=False",
                ")",
            ]
        ),
        "step": "model.backward(model(torch.ones(1)))\nmodel.step()",
        "overflow": 'model.backward(model(torch.full((1,), float("inf"))))\nmodel.step()',
        "subject": subject,
        "expected": expected,
    }
    values = {"config": config, "elements": ELEMENTS}
    return Draft(HOME, "deepspeed_own.py.j2", own, observed, values, f"deepspeed {case.result.version}", case=case)


def _clipped(case: FailureCase) -> tuple[str, str, str]:
    """Subject, and what is expected and observed, of a step with a clipped gradient."""
    clip, steps = case.scenario.optimizer.clip, sum(op.kind == "step" for op in case.ops)
    expected = f"[1 - {steps} * {LR} * {clip / ELEMENTS**0.5}]  # the gradient's norm of 2.0 is clipped to {clip}"
    return f"weight after {steps} steps", expected, "model.module.weight.unique().tolist()"
