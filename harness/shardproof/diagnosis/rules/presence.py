"""Rules for state that is missing, or that no contract expects. Without a pair of tensors no bits can be compared, so
these rules argue from the operation after which the state was missing."""

from __future__ import annotations

import re

from shardproof.diagnosis.explanation import Context, Finding, Rule, tensor
from shardproof.diff import NOTHING, Difference, as_numbers
from shardproof.observe.logical import Key
from shardproof.program import LOADS

LAZY_ROLES = ("exp_avg", "exp_avg_sq", "momentum", "step")

SPOKEN = ("warning", "tag", "resolved", "setting")
"""Roles that are no tensors, with rules of their own."""

WARNING_LENGTH = 200

_ITEM = re.compile(r"key '(?P<name>[^']*)': stored item: given '(?P<held>[^']*)'; allowed: (?P<described>[^;]*);")
"""How `harness/shardproof/readers/` say that an item has another shape than it is described with."""


def not_saved(difference: Difference, context: Context) -> Finding | None:
    """A checkpoint lacks a value that the format stores (AM-3250, PT-192202, APEX-704); or a state dict that was kept
    in memory may, of which nothing is seen but what a load makes of it."""
    key = difference.key
    if difference.kind == "missing" and key.where == "live" and _kind(key.op, context) == "recall":
        return _perhaps_not_kept(key, context)
    if difference.kind != "missing" or difference.key.where != "written":
        return None
    return _finding(difference, f"{tensor(difference.key)} is not in the checkpoint of", context)


def _kind(index: int, context: Context) -> str:
    op = context.op(index)
    return op.kind if op else ""


def _perhaps_not_kept(key: Key, context: Context) -> Finding | None:
    """State of a parameter that is gone after a load, while that of others is there."""
    kept = next((i for i in range(key.op - 1, -1, -1) if _kind(i, context) == "keep"), None)
    loaded = any(other[:3] == key[:3] for other in context.observed)
    if kept is None or not loaded or key.role in SPOKEN or key._replace(op=kept) not in context.observed:
        return None
    clause = f"{tensor(key)} was there when {context.op_name(kept)} took the state, and is not after "
    clause += f"{context.op_name(key.op)}, which may have left it out as well"
    return Finding("possible", clause, {"name": key.fqn, "role": key.role, "kept_by": kept})


def state_missing(difference: Difference, context: Context) -> Finding | None:
    """A value that must exist does not (MLM-6191, AM-1698, PT-192225)."""
    if difference.kind != "missing" or difference.key.where != "live" or difference.key == NOTHING:
        return None
    if difference.key.role in SPOKEN:
        return None
    return _finding(difference, f"{tensor(difference.key)} does not exist after", context)


def optimizer_not_loaded(difference: Difference, context: Context) -> Finding | None:
    """After a load the optimizer has no state of any parameter, as if it had just been built: its part of the load was
    left out. That a group then has the settings of the build follows from it."""
    key = difference.key
    loads = _kind(key.op, context) in LOADS
    if not loads or (difference.kind, key.where) != ("missing", "live") or key.role not in LAZY_ROLES:
        return None
    at = (key.op, "live")
    wanted = [other for other in context.expected if other[:2] == at and other.role in LAZY_ROLES]
    if len(wanted) < 2 or any(other in context.observed for other in wanted):
        return None
    clause = f"{context.op_name(key.op)} left {key.fqn} without {key.role}, and no other parameter has any state"
    return Finding("certain", clause, {"name": key.fqn, "role": key.role})


def initialising_step(difference: Difference, context: Context) -> Finding | None:
    """Optimizer state appeared in an operation that takes no step (TT-4382, PT-164929: a dummy step)."""
    key = difference.key
    if difference.kind != "extra" or key.role not in LAZY_ROLES or context.op_kind(key.op) in ("step", "overflow"):
        return None
    if key.where != "live" or key._replace(op=key.op - 1) in context.observed or _saved_as(key, context) is not None:
        return None
    return Finding(
        "certain", f"{tensor(key)} was created by {context.op_name(key.op)}", {"name": key.fqn, "role": key.role}
    )


def loaded_unasked(difference: Difference, context: Context) -> Finding | None:
    """State that nobody asked to load has the value that was saved: a model-only load restored the optimizer too."""
    key = difference.key
    if key.where != "live" or context.op_kind(key.op) != "load_model_only":
        return None
    loaded = difference.kind == "extra" or (difference.kind == "bits" and key.role == "hyperparameter")
    saved = _saved_as(key, context) if loaded else None
    if saved is None:
        return None
    clause = f"{tensor(key)} has its value of {context.op_name(saved)} after {context.op_name(key.op)}"
    return Finding("certain", clause, {"name": key.fqn, "role": key.role, "value_of_op": saved})


def _saved_as(key: Key, context: Context) -> int | None:
    """The last save of exactly these bits, if they say anything: a tensor of zeros may be a fresh one."""
    observed = context.observed.get(key)
    if observed is None or not as_numbers(observed).any():
        return None
    saves = (i for i in range(key.op - 1, -1, -1) if context.op_kind(i) in ("save", "begin_save"))
    return next((i for i in saves if context.expected.get(key._replace(op=i)) == observed), None)


def warned(difference: Difference, context: Context) -> Finding | None:
    """The library warned where nothing is wrong; the text is the observed value."""
    said = context.observed.get(difference.key)
    if difference.kind != "extra" or difference.key.role != "warning" or said is None:
        return None
    first = " ".join(said.data.decode("utf-8", "replace").split())[:WARNING_LENGTH]
    clause = f"{difference.key.fqn} says “{first}” in {context.op_name(difference.key.op)}"
    return Finding("certain", clause, {"name": difference.key.fqn, "ranks": list(difference.ranks)})


def marks(difference: Difference, context: Context) -> Finding | None:
    """A parameter is marked as tensor-parallel and is not, or the other way round (MLM-5916, MLM-7452)."""
    if difference.key.role != "tag" or difference.kind not in ("missing", "extra", "bits"):
        return None
    how = {"missing": "has no mark", "extra": "is marked", "bits": "has another mark"}[difference.kind]
    clause = f"{difference.key.fqn} {how} after {context.op_name(difference.key.op)}"
    return Finding("certain", clause, {"name": difference.key.fqn, "kind": difference.kind})


def resolved_otherwise(difference: Difference, context: Context) -> Finding | None:
    """A setting, read back as text, has another value than the configuration gives."""
    expected, observed = context.expected.get(difference.key), context.observed.get(difference.key)
    if difference.key.role != "resolved" or expected is None or observed is None:
        return None
    wanted, got = (value.data.decode("utf-8", "replace") for value in (expected, observed))
    clause = f"{difference.key.fqn} is {got!r} instead of {wanted!r} after {context.op_name(difference.key.op)}"
    return Finding("certain", clause, {"name": difference.key.fqn, "expected": wanted, "observed": got})


def boxes_lie(difference: Difference, context: Context) -> Finding | None:
    """A checkpoint whose data has other sizes than its own description says (PT-161368, DS-1380).

    The description comes from the placement of a tensor, the data from what a rank holds: where both are computed
    apart, they can disagree.
    """
    if difference.kind != "unreadable":
        return None
    said = _ITEM.search(difference.detail)
    if said is None:
        return None
    told = f"{said['name']} is {said['held']}, and was to be {said['described']}"
    clause = f"{told}, after {context.op_name(difference.key.op)}"
    return Finding("certain", clause, {"name": difference.key.fqn, "detail": difference.detail})


def state_invented(difference: Difference, context: Context) -> Finding | None:
    """There is a value that must not exist (PT-192225, MLM-2576)."""
    if difference.kind != "extra" or difference.key.role in SPOKEN:
        return None
    return _finding(difference, f"{tensor(difference.key)} exists after", context)


def wrong_shape(difference: Difference, context: Context) -> Finding | None:
    """A value has another shape: local instead of global, a scalar as vector (PT-108860, TE-2795, PT-110762)."""
    if difference.kind != "shape" or difference.key.role in SPOKEN:
        return None
    return _finding(difference, f"{tensor(difference.key)} has {difference.detail} after", context)


def _finding(difference: Difference, clause: str, context: Context) -> Finding:
    evidence = {"name": difference.key.fqn, "role": difference.key.role, "ranks": list(difference.ranks)}
    return Finding("likely", f"{clause} {context.op_name(difference.key.op)}", evidence)


FIRST = (Rule("optimizer_not_loaded", "The optimizer was not loaded", optimizer_not_loaded, ("AM-1698", "PT-192225")),)

RULES = (
    Rule("loaded_unasked", "A load of the model alone restored the optimizer's state too", loaded_unasked, ("DS-762",)),
    Rule("boxes_lie", "The checkpoint describes other boxes than it holds", boxes_lie, ("PT-161368", "MLM-3510")),
    Rule("resolved_otherwise", "A setting has another value than was asked for", resolved_otherwise, ("AM-2419e",)),
    Rule("marks", "Parameters are marked wrongly for tensor parallelism", marks, ("MLM-5916", "MLM-7452")),
    Rule("warned", "The library warned", warned),
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
