"""A rule of diagnosis that only this system has."""

from __future__ import annotations

from shardproof.diagnosis.explanation import Context, Finding, Rule, tensor
from shardproof.diff import Difference


def unfrozen_after_wrapping(difference: Difference, context: Context) -> Finding | None:
    """A gradient is no mean over the ranks, of a parameter that was frozen when DistributedDataParallel was built: it
    has no place in the buckets, and nothing reduces it."""
    key = difference.key
    if (key.role, difference.kind, context.op_kind(key.op)) != ("grad", "bits", "step"):
        return None
    if context.model.param(key.fqn).spec.trainable != "later":
        return None
    thawed = next((op for op in reversed(context.ops[: key.op]) if op.kind == "unfreeze"), None)
    if thawed is None:
        return None
    clause = f"{tensor(key)} after {context.op_name(key.op)}, frozen until {context.op_name(thawed.index)}"
    return Finding("certain", clause, {"name": key.fqn, "unfrozen_by": thawed.index})


RULES = (
    Rule(
        "unfrozen_after_wrapping",
        "A parameter that became trainable after DistributedDataParallel was built is in none of its buckets",
        unfrozen_after_wrapping,
    ),
)
