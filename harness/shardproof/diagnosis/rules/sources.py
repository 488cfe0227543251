"""Rules that find where wrong values came from: another parameter, another role, an earlier moment, or another arm of
the program.

For example, a master that after a load has the bits of the run that never loaded was left out of the load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from shardproof.diagnosis.explanation import Confidence, Context, Finding, Pair, Rule, moment, tensor
from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.assemble import as_bits
from shardproof.observe.logical import Key, Value
from shardproof.observe.record import WRITTEN
from shardproof.scenario import FLOAT_DTYPES

STATE_ROLES = ("param", "master", "grad", "exp_avg", "exp_avg_sq", "momentum")


def other_parameter(difference: Difference, context: Context) -> Finding | None:
    """The deviating elements are those expected of another parameter (MLM-2777: an index map in another order)."""
    pair = context.pair(difference)
    if pair is None or difference.key.role in ("step", "hyperparameter", "scheduler", "scaler"):
        return None
    for other, value in context.siblings(difference.key):
        if pair.explained_by(value):
            clause = f"{tensor(difference.key)} holds what belongs to {other.fqn}{_after(difference.key, context)}"
            return Finding(pair.strength, clause, {"name": difference.key.fqn, "holds": other.fqn, **_where(pair)})
    return _stretch_of_another(difference, pair, context)


def _stretch_of_another(difference: Difference, pair: Pair, context: Context) -> Finding | None:
    """After a load, all of a tensor lies somewhere inside of another one (DS-7585: an offset into another buffer)."""
    key = difference.key
    if not context.op_kind(key.op).startswith("load") or pair.strength != "certain":
        return None
    itemsize, shortest = pair.observed_bits.itemsize, len(pair.observed.data)
    for other, value in context.siblings(key):
        at = value.data.find(pair.observed.data) if value.dtype == pair.observed.dtype else -1
        if at >= 0 and at % itemsize == 0 and len(value.data) > shortest:
            start = at // itemsize
            clause = f"{tensor(key)} holds what belongs to {other.fqn} from element {start} on{_after(key, context)}"
            return Finding("certain", clause, {"name": key.fqn, "holds": other.fqn, "at": start, **_where(pair)})
    return None


def permuted_parameters(difference: Difference, context: Context) -> Finding | None:
    """Whole tensors are filed under each other's names: the permutation of all of them (MLM-2777, MLM-5835a)."""
    key = difference.key
    if key.role not in STATE_ROLES or context.pair(difference) is None:
        return None
    order = _permutation(key, context)
    if key.fqn not in order:
        return None
    alike = [r for r in STATE_ROLES if r == key.role or _permutation(key._replace(role=r), context) == order]
    where = "written " if key.where == "written" else ""
    exchange = ", ".join(f"{name} holds {of}'s" for name, of in order.items())
    clause = f"{where}{listed(alike)}{_after(key, context)}: {exchange}"
    evidence = {"name": key.fqn, "holds": order[key.fqn], "permutation": order, "roles": alike}
    return Finding("certain", clause, evidence)


def _permutation(key: Key, context: Context) -> dict[str, str]:
    """Finds parameters whose values were exchanged among themselves: for each name, the name of the parameter whose
    value is found there. Empty if the values are not a permutation, as in a cycle `a → b → a`."""
    return context.once(("permutation", key[:3]), partial(_permutation_of, key, context))


def _permutation_of(key: Key, context: Context) -> dict[str, str]:
    wanted = context.of_role(key)
    found: dict[str, str] = {}
    for fqn, value in wanted.items():
        held = context.observed.get(key._replace(fqn=fqn))
        if held is not None and held != value:
            found[fqn] = next((other for other, own in wanted.items() if _in_dtype(own, held.dtype) == held), "")
    return dict(sorted(found.items())) if sorted(found) == sorted(found.values()) else {}


def _in_dtype(value: Value, dtype: str) -> Value:
    """A value as another parameter holds it, which may be of another dtype."""
    if value.dtype == dtype or not {value.dtype, dtype} <= set(FLOAT_DTYPES):
        return value
    return value._replace(dtype=dtype, data=as_numbers(value).astype(numpy_dtype(dtype)).tobytes())


def listed(words: Iterable[object]) -> str:
    """Words or numbers as a sentence lists them: `a, b and c`."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def other_role(difference: Difference, context: Context) -> Finding | None:
    """The deviating elements are those expected of another role of the same parameter (exp_avg against exp_avg_sq)."""
    pair = context.pair(difference)
    if pair is None or difference.key.role not in STATE_ROLES:
        return None
    for role in STATE_ROLES:
        value = context.expected.get(difference.key._replace(role=role))
        if role != difference.key.role and value is not None and pair.explained_by(value):
            clause = f"{tensor(difference.key)} holds its {role}{_after(difference.key, context)}"
            return Finding(pair.strength, clause, {"name": difference.key.fqn, "holds": role, **_where(pair)})
    return None


def load_did_nothing(difference: Difference, context: Context) -> Finding | None:
    """After a load or a refresh, the value is still the one of just before (PT-140898, MBR-4893, MLM-mr2871).

    A master whose parameter was loaded is no case of this: there the load did something, and the rules about stale
    copies say what it forgot.
    """
    key = difference.key
    if context.op_kind(key.op) not in ("load", "load_model_only", "reload_params") or key.where != "live":
        return None
    before = context.expected.get(key._replace(op=key.op - 1))
    evidence = {"name": key.fqn, "role": key.role, "unchanged_since": key.op - 1}
    if schedule_unchanged(key, context):
        return Finding("certain", f"the learning-rate schedule is unchanged by {context.op_name(key.op)}", evidence)
    clause = f"{tensor(key)} is unchanged by {context.op_name(key.op)}"
    if difference.kind == "missing":
        loaded_elsewhere = any(other[:3] == key[:3] for other in context.observed)
        if before is not None or loaded_elsewhere:
            return None
        return Finding("likely", f"{tensor(key)} is still absent after {context.op_name(key.op)}", evidence)
    pair = context.pair(difference)
    if pair is None or before is None or not pair.explained_by(before) or _copy_of_loaded(key, context):
        return None
    if len(pair.at) < difference.total:
        few = f"{len(pair.at)} of {difference.total} elements of {tensor(key)}"
        clause = f"{few} are unchanged by {context.op_name(key.op)}"
    *_, oldest = (index for index, value in context.earlier(key) if pair.explained_by(value))
    if context.op_kind(oldest) == "build":
        clause += f" and still {'have' if len(pair.at) < difference.total else 'has'} {moment(oldest, context)}"
    return Finding(_at_least_likely(pair), clause, evidence)


def schedule_unchanged(key: Key, context: Context) -> bool:
    """Whether a load has left every number of the learning-rate schedule as it was, of which it should have changed
    some."""
    if key.role != "scheduler" or key.where != "live" or context.op_kind(key.op) != "load":
        return False
    wanted = {key._replace(fqn=fqn): value for fqn, value in context.of_role(key).items()}
    before = {k: context.expected.get(k._replace(op=key.op - 1)) for k in wanted}
    return wanted != before and {k: context.observed.get(k) for k in wanted} == before


def kept_state_changed(difference: Difference, context: Context) -> Finding | None:
    """A state dict that is kept in memory restored a value once, and the next time leaves it as the steps in between
    made it: what was kept is the live state itself."""
    key, pair = difference.key, context.pair(difference)
    before = context.expected.get(key._replace(op=key.op - 1))
    if key.where != "live" or pair is None or before is None or not pair.explained_by(before):
        return None
    again = [i for i in range(key.op) if _recalls(i, context)] if _recalls(key.op, context) else []
    then = [key._replace(op=index) for index in again]
    if not then or any(context.observed.get(earlier) != context.expected.get(earlier) for earlier in then):
        return None
    clause = f"{tensor(key)} is unchanged by {context.op_name(key.op)}, though {context.op_name(again[-1])} restored it"
    evidence = {"name": key.fqn, "role": key.role, "restored_by": again[-1]}
    return Finding(_at_least_likely(pair), clause, evidence)


def _recalls(index: int, context: Context) -> bool:
    op = context.op(index)
    return op is not None and op.kind == "recall"


def _copy_of_loaded(key: Key, context: Context) -> bool:
    """Whether a value is the optimizer's copy of a parameter that does have the right value."""
    param = key._replace(role="param")
    return key.role == "master" and param in context.observed and context.observed[param] == context.expected.get(param)


def stale_value(difference: Difference, context: Context) -> Finding | None:
    """The deviating elements are those expected after an earlier operation (PT-163130, DS-7707, TT-4598)."""
    return _earlier(difference, context, initial=False)


def later_value(difference: Difference, context: Context) -> Finding | None:
    """A save wrote what a later step has made of a tensor: it was still reading when training went on, or what was kept
    for it was no copy."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or key.where != WRITTEN or context.op_kind(key.op) != "save":
        return None
    source = next((index for index, value in context.later(key) if pair.explained_by(value)), None)
    if source is None:
        return None
    then, now = context.ops[source].iteration + 1, context.ops[context.taken(key)].iteration
    clause = f"{tensor(key)} is of step {then} ({context.op_name(source)}), the save of step {now}"
    evidence = {"name": key.fqn, "role": key.role, "of_step": then, "save_of_step": now, **_where(pair)}
    return Finding(_at_least_likely(pair), clause, evidence)


def initial_value(difference: Difference, context: Context) -> Finding | None:
    """The deviating elements are still those of the initialisation (MBR-3949, DS-762)."""
    return _earlier(difference, context, initial=True)


def _earlier(difference: Difference, context: Context, *, initial: bool) -> Finding | None:
    key, pair = difference.key, context.pair(difference)
    if pair is None or key.role in ("step", "scheduler"):
        return None
    matching = [index for index, value in context.earlier(key) if pair.explained_by(value)]
    if not matching or (context.op_kind(matching[-1]) == "build") is not initial:
        return None
    source = matching[-1] if initial else matching[0]
    clause = f"{tensor(key)} has {moment(source, context)}{_after(key, context)}"
    return Finding(_at_least_likely(pair), clause, {"name": key.fqn, "value_of_op": source, **_where(pair)})


def load_without_effect(difference: Difference, context: Context) -> Finding | None:
    """After a load, the deviating elements are those of the cold arm, which never loaded (PT-140898)."""
    return _cold(difference, context) if context.op_kind(difference.key.op).startswith("load") else None


def stale_copy_won(difference: Difference, context: Context) -> Finding | None:
    """After a step that followed a sound load, the deviating elements are those of the cold arm: the step started from
    what was there before the load (MBR-3949, DS-762)."""
    key = difference.key
    if context.op_kind(key.op) != "step":
        return None
    finding, start, load = _cold(difference, context), _start_of_cold(key, context), _last_load(key.op, context)
    if finding is None or start is None or load is None:
        return finding
    clause = f"{tensor(key)}{_after(key, context)} is the update of {moment(start, context)}, not of what "
    return replace(
        finding,
        clause=f"{clause}{context.op_name(load)} loaded",
        evidence={**finding.evidence, "started_from": start, "loaded_by": load},
    )


def _start_of_cold(key: Key, context: Context) -> int | None:
    """The operation that gave a tensor the value that the cold run's step starts from; None if that has no such
    value."""
    before = context.cold.get(key._replace(op=key.op - 1))
    start = None
    for index in range(key.op - 1, -1, -1):
        if before is None or context.cold.get(key._replace(op=index)) != before:
            break
        start = index
    return start


def _last_load(index: int, context: Context) -> int | None:
    loads = (i for i in range(index - 1, -1, -1) if context.op_kind(i).startswith("load"))
    return next(loads, None)


def remainder_as_value(difference: Difference, context: Context) -> Finding | None:
    """A master is the number that its low 16 bits make as a signed integer. The optimizer keeps those beside a bf16
    parameter as a *remainder*, and somebody took the remainder for the master."""
    key, pair = difference.key, context.pair(difference)
    if key.role != "master" or pair is None or pair.expected.dtype != "fp32":
        return None
    low = (pair.expected_bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16)
    if not (pair.got == low).all():
        return None
    clause = f"{tensor(key)}{_after(key, context)} holds the low 16 bits of its values, as whole numbers"
    return Finding(pair.strength, clause, {"name": key.fqn, **_where(pair)})


def stale_remainder(difference: Difference, context: Context) -> Finding | None:
    """A master has the upper half of the right value and the lower 16 bits of an earlier one. The optimizer keeps
    only those 16 bits beside the bf16 parameter, and a load or refresh did not reach them."""
    key, pair = difference.key, context.pair(difference)
    param = context.observed.get(key._replace(role="param"))
    if key.role != "master" or pair is None or param is None or (pair.expected.dtype, param.dtype) != ("fp32", "bf16"):
        return None
    rounded = (pair.observed_bits + np.uint32(0x8000)) >> np.uint32(16)
    low = np.uint32(0xFFFF)
    if not (rounded == as_bits(param)[pair.at]).all():
        return None
    for index, value in context.earlier(key):
        if (as_bits(value)[pair.at] & low == pair.observed_bits & low).all():
            clause = f"{tensor(key)}{_after(key, context)} is the parameter with the low 16 bits of "
            clause += moment(index, context)
            return Finding(_at_least_likely(pair), clause, {"name": key.fqn, "value_of_op": index, **_where(pair)})
    return None


def _cold(difference: Difference, context: Context) -> Finding | None:
    """The deviating elements are those of a run in which no load did anything."""
    pair, value = context.pair(difference), context.cold.get(difference.key)
    if pair is None or value is None or not pair.explained_by(value):
        return None
    clause = f"{tensor(difference.key)} is as in the cold run{_after(difference.key, context)}"
    return Finding(pair.strength, clause, {"name": difference.key.fqn, **_where(pair)})


def zeroed(difference: Difference, context: Context) -> Finding | None:
    """The deviating elements are zero: dropped or never filled (MLM-4423, TE-3207, TT-1226)."""
    pair = context.pair(difference)
    if pair is None or not pair.is_float or pair.observed_bits.any():
        return None
    clause = f"{len(pair.at)} of {difference.total} elements of {tensor(difference.key)} are zero"
    confidence: Confidence = "likely" if len(pair.at) > 1 else "possible"
    return Finding(confidence, clause + _after(difference.key, context), {"name": difference.key.fqn, **_where(pair)})


def _at_least_likely(pair: Pair) -> Confidence:
    """The finding with its confidence raised to `likely`: a tensor's own earlier bits are no coincidence, even where
    there are few."""
    return "likely" if pair.strength == "possible" else pair.strength


def _after(key: Key, context: Context) -> str:
    return f" after {context.op_name(key.op)}"


def _where(pair: Pair) -> dict[str, int]:
    return {"elements": len(pair.at)}


RULES = (
    Rule("kept_state_changed", "What was kept in memory has changed since", kept_state_changed),
    Rule(
        "load_did_nothing",
        "The load had no effect on some state",
        load_did_nothing,
        ("PT-140898", "MBR-4893", "MBR-5680", "MLM-mr2871", "DS-762", "PT-129079"),
    ),
    Rule(
        "permuted_parameters",
        "Whole tensors are stored under each other's names",
        permuted_parameters,
        ("MLM-2777", "MLM-5835a", "DS-5342", "DS-5395"),
    ),
    Rule(
        "other_parameter",
        "Values are stored under another parameter's name",
        other_parameter,
        (
            "MLM-2777",
            "MLM-5835a",
            "MLM-4046",
            "MLM-7162",
            "PT-54736",
            "FS-1071",
            "DS-7585",
            "ACC-3982",
            "DS-5342",
            "DS-5395",
        ),
    ),
    Rule("other_role", "State tensors of one parameter are exchanged", other_role),
    Rule(
        "initial_value",
        "The initialisation was never overwritten",
        initial_value,
        ("MBR-3949", "DS-762", "MLM-5071", "TT-1226"),
    ),
    Rule("remainder_as_value", "Remainders were taken for masters", remainder_as_value),
    Rule(
        "stale_remainder",
        "The low bits of the masters were not refreshed",
        stale_remainder,
    ),
    Rule(
        "stale_value",
        "A copy from an earlier moment was not refreshed",
        stale_value,
        ("DS-7707", "PT-163130", "PT-138575", "MBR-3397", "MLM-7449a", "MLM-6871", "TT-4598", "PT-176076"),
    ),
    Rule("later_value", "The save was still reading when training went on", later_value),
    Rule("load_without_effect", "The load did nothing", load_without_effect, ("PT-140898",)),
    Rule(
        "stale_copy_won",
        "The load looked right, and the next update started from an earlier moment: a copy that the load missed won",
        stale_copy_won,
        ("MBR-3949", "MLM-5071", "DS-762"),
    ),
    Rule("zeroed", "Values were dropped or never filled in", zeroed, ("MLM-4423", "TE-3207", "TT-1226", "PT-140898")),
)
