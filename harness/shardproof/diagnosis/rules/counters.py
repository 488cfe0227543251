"""Rules for scalars: step counters, counters of the schedule and the loss scaler, and hyperparameters of param
groups.

For example, a step that is one ahead after a save is the dummy step by which torch creates missing optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardproof.diagnosis.explanation import Context, Finding, Rule, tensor
from shardproof.diagnosis.rules.sources import schedule_unchanged
from shardproof.diff import Difference, as_numbers
from shardproof.observe.logical import Key, Value

TORCH_DEFAULTS = {"lr": 1e-3, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "momentum": 0.0}
"""Defaults of torch.optim.AdamW and SGD (weight_decay: AdamW's)."""


_ROUGH = {"fp64": 2.0**-40, "fp32": 2.0**-16, "fp16": 2.0**-7, "bf16": 2.0**-5}


def roughly(dtype: str) -> float:
    """How far, relative to itself, a moment of a dtype may be off that is worked out again from rounded ones; 0 in any
    other dtype, such as fp8, where within the roundings any value would do."""
    return _ROUGH.get(dtype, 0.0)


def counter_off(difference: Difference, context: Context) -> Finding | None:
    """A counter is off by a whole number (PT-164929 ahead, DS-4396 back at 0, TE-3318 on some ranks)."""
    key, pair = difference.key, context.pair(difference)
    counts = key.role in ("step", "scheduler", "scaler") or (key.role == "buffer" and pair and not pair.is_float)
    if pair is None or not counts or len(pair.expected.data) > 8 or key.fqn == "scale" or "last_lr" in key.fqn:
        return None
    still = key.role == "buffer" and _stood_still(key, context)
    if key.role == "buffer" and not still and any(pair.explained_by(value) for _, value in context.earlier(key)):
        return None  # a buffer need not be a counter, and another rule knows if it is an earlier value
    wanted, got = float(pair.wanted[0]), float(pair.got[0])
    off = got - wanted
    if not off.is_integer():  # nor infinite or NaN, as a flipped bit makes a counter
        return None
    how = (
        "did not count"
        if still
        else "is back at 0"
        if got == 0
        else f"is {abs(int(off))} {'ahead' if off > 0 else 'behind'}"
    )
    clause = f"{tensor(key)} {how} after {context.op_name(key.op)}: {got:g} instead of {wanted:g}"
    return Finding("certain", clause, {"name": key.fqn, "expected": wanted, "observed": got})


def _stood_still(key: Key, context: Context) -> bool:
    """Whether a live integer, right until then, was to rise by one in the step that left it as it was."""
    before, after = (context.expected.get(key._replace(op=op)) for op in (key.op - 1, key.op))
    if key.where != "live" or context.op_kind(key.op) != "step" or before is None or after is None:
        return False
    rises = as_numbers(after).astype(np.float64) - as_numbers(before).astype(np.float64)
    return bool((rises == 1).all()) and context.observed.get(key) == before


def counted_anew(difference: Difference, context: Context) -> Finding | None:
    """A momentum that was right before a step is the gradient alone after it: the step was taken for the first
    (DS-4396: state is restored, and its count is not)."""
    key, pair = difference.key, context.pair(difference)
    if key.role != "momentum" or context.op_kind(key.op) != "step" or pair is None or not pair.is_float:
        return None
    before = key._replace(op=key.op - 1)
    held = context.expected.get(before)
    if held is None or held.shape != pair.expected.shape or context.observed.get(before) != held:
        return None
    past = as_numbers(held)[pair.at].astype(np.float64)
    decays = context.settings("momentum", before.op)
    rough = roughly(pair.expected.dtype)
    if not past.any() or not any(np.allclose(pair.got, pair.wanted - d * past, rtol=rough, atol=0) for d in decays):
        return None
    clause = f"{tensor(key)} after {context.op_name(key.op)} is what a first step makes, without its value of "
    clause += context.op_name(before.op)
    return Finding("likely", clause, {"name": key.fqn, "elements": len(pair.at)})


def hyperparameter(difference: Difference, context: Context) -> Finding | None:
    """A group's number is another group's, an earlier one, or a default (FS-58, MLM-mr3394)."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or key.role not in ("hyperparameter", "scheduler") or pair.expected.dtype == "utf8":
        return None
    if schedule_unchanged(key, context):
        return None  # what the load did not do is said once
    wanted, got = float(pair.wanted[0]), float(pair.got[0])
    source = next((name for name, number in _candidates(difference, context) if number == got), "no known source")
    clause = f"{key.fqn} is {got:g} instead of {wanted:g} after {context.op_name(key.op)}: {source}"
    confidence = "likely" if source == "no known source" else "certain"
    return Finding(confidence, clause, {"name": key.fqn, "expected": wanted, "observed": got, "source": source})  # type: ignore[arg-type]


def _candidates(difference: Difference, context: Context) -> Iterator[tuple[str, float]]:
    key = difference.key
    setting = key.fqn.rpartition(".")[2]
    for other, value in context.siblings(key):
        if other.fqn.endswith(f".{setting}"):
            yield f"that of {other.fqn.rpartition('.')[0]}", _number(value)
    for index, value in context.earlier(key):
        yield f"its value of {context.op_name(index)}", _number(value)
    if hasattr(context.scenario.optimizer, setting):
        yield "the optimizer's common setting", float(getattr(context.scenario.optimizer, setting))
    if setting in TORCH_DEFAULTS:
        yield "torch's default", TORCH_DEFAULTS[setting]


def _number(value: Value) -> float:
    return float(as_numbers(value)[0])


def group_members(difference: Difference, context: Context) -> Finding | None:
    """A group has other parameters, or the same in another order (MLM-mr3394, PT-127071)."""
    key = difference.key
    if key.role != "hyperparameter" or not key.fqn.endswith(".params"):
        return None
    held = (context.expected.get(key), context.observed.get(key))
    wanted, got = ((value.data.decode().split("\n") if value and value.data else []) for value in held)
    if sorted(wanted) == sorted(got):
        how = "has its parameters in another order"
    else:
        how = f"lacks {sorted(set(wanted) - set(got))} and has {sorted(set(got) - set(wanted))} too many"
    evidence = {"name": key.fqn, "expected": wanted, "observed": got}
    return Finding("certain", f"{key.fqn.partition('.')[0]} {how} after {context.op_name(key.op)}", evidence)


def setting_changed(difference: Difference, context: Context) -> Finding | None:
    """A key of a group, or of a schedule, is gone, is new, or holds another value or kind of value (PT-139575: a tensor
    lr becomes a number)."""
    key = difference.key
    if key.role not in ("setting", "schedule"):
        return None
    held = (context.expected.get(key), context.observed.get(key))
    wanted, got = (value.data.decode() if value else None for value in held)
    group, _, name = key.fqn.rpartition(".") if key.role == "setting" else ("the schedule", "", key.fqn)
    if got is None:
        how = f"is gone; it was `{wanted}`"
    elif wanted is None:
        how = f"is new: `{got}`"
    else:
        how = f"is `{got}` instead of `{wanted}`"
    evidence: dict[str, object] = {"name": key.fqn, "expected": wanted, "observed": got}
    return Finding("certain", f"the key {name} of {group} {how} after {context.op_name(key.op)}", evidence)


RULES = (
    Rule(
        "counter_off",
        "A counter does not count the steps that were taken",
        counter_off,
        ("MLM-5976", "PT-164929", "DS-5104", "TT-4382", "DS-4396", "TE-3318", "PT-96251", "AO-4915", "ACC-4289"),
    ),
    Rule("counted_anew", "A step was taken as if it were the first", counted_anew, ("DS-4396",)),
    Rule(
        "hyperparameter",
        "A param group has lost its own setting",
        hyperparameter,
        ("FS-58", "MLM-mr3394", "AO-2606", "PT-127071", "PT-139575", "TT-4598", "APEX-766", "MLM-1505db"),
    ),
    Rule("setting_changed", "A param group has other keys, or other kinds of values", setting_changed, ("PT-139575",)),
    Rule("group_members", "Param groups were rebuilt differently", group_members, ("MLM-mr3394", "ACC-3564")),
)
