"""State that is absent, or that nobody expected: there is nothing to compare bit for bit, so that the operation
tells."""

from __future__ import annotations

from harness.diagnosis.explanation import Context, Finding, Rule, tensor
from harness.diff import NOTHING, Difference

LAZY_ROLES = ("exp_avg", "exp_avg_sq", "momentum", "step")


def not_saved(difference: Difference, context: Context) -> Finding | None:
    """A checkpoint lacks a value that the format stores (AM-3250, PT-192202, APEX-704)."""
    if difference.kind != "missing" or difference.key.where != "written":
        return None
    return _finding(difference, f"{tensor(difference.key)} is not in the checkpoint of", context)


def state_missing(difference: Difference, context: Context) -> Finding | None:
    """A value that must exist does not (MLM-6191, AM-1698, PT-192225)."""
    if difference.kind != "missing" or difference.key.where != "live" or difference.key == NOTHING:
        return None
    return _finding(difference, f"{tensor(difference.key)} does not exist after", context)


def initialising_step(difference: Difference, context: Context) -> Finding | None:
    """Optimizer state appeared in an operation that takes no step (TT-4382, PT-164929: a dummy step)."""
    key = difference.key
    if difference.kind != "extra" or key.role not in LAZY_ROLES or context.op_kind(key.op) in ("step", "overflow"):
        return None
    if key.where != "live" or key._replace(op=key.op - 1) in context.observed:
        return None
    return Finding(
        "certain", f"{tensor(key)} was created by {context.op_name(key.op)}", {"name": key.fqn, "role": key.role}
    )


def state_invented(difference: Difference, context: Context) -> Finding | None:
    """There is a value that must not exist (PT-192225, MLM-2576)."""
    if difference.kind != "extra":
        return None
    return _finding(difference, f"{tensor(difference.key)} exists after", context)


def wrong_shape(difference: Difference, context: Context) -> Finding | None:
    """A value has another shape: local instead of global, a scalar as vector (PT-108860, TE-2795, PT-110762)."""
    if difference.kind != "shape":
        return None
    return _finding(difference, f"{tensor(difference.key)} has {difference.detail} after", context)


def _finding(difference: Difference, clause: str, context: Context) -> Finding:
    evidence = {"name": difference.key.fqn, "role": difference.key.role, "ranks": list(difference.ranks)}
    return Finding("likely", f"{clause} {context.op_name(difference.key.op)}", evidence)


RULES = (
    Rule(
        "initialising_step",
        "State was created by an operation that takes no step",
        initialising_step,
        ("TT-4382", "PT-164929", "MLM-5976", "DS-5104", "PT-125708"),
    ),
    Rule("not_saved", "The checkpoint is incomplete", not_saved, ("AM-3250", "PT-192202", "APEX-704", "PT-148825")),
    Rule("state_missing", "State is missing", state_missing, ("AM-1698", "MLM-6191", "PT-192225", "PT-192202")),
    Rule("state_invented", "There is state that must not exist", state_invented, ("PT-192225", "MLM-2576")),
    Rule("wrong_shape", "A shape is wrong", wrong_shape, ("PT-108860", "TE-2795", "TE-2424", "PT-110762", "TT-4593")),
)
