"""Rules for wrong optimizer updates: a step from stale weights, weight decay applied twice, or another kernel.

These rules know how far a step can move a weight, and what is left if a wrong start is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.arrangement import DISTINCT, distinct
from shardproof.diagnosis.explanation import Confidence, Context, Finding, Floats, Pair, Rule, moment, tensor
from shardproof.diagnosis.rules.counters import roughly
from shardproof.diff import Difference, as_numbers
from shardproof.models import GroupSpec
from shardproof.observe.assemble import as_bits, elements_of
from shardproof.observe.logical import Key, Value

STEP_RADIUS = 4.0
"""How far one step may move a weight, in learning rates: an Adam update is close to 1 in most elements, and
weight decay adds at most lr × weight decay × |weight|."""

MOMENTS = {"exp_avg": "beta1", "exp_avg_sq": "beta2", "momentum": "momentum"}
"""Moments, and the setting of an optimizer that says which share of the earlier value they keep."""

ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""How far, relative to itself, a weight of half precision may be off by its rounding."""

FAR = 3
"""How many roundings two values must lie apart, or a match of one of them may be one of the other."""

KERNEL_ULPS = 8
"""FusedAdam subtracts an fp32 beta from 1 where torch subtracts a double: the rests differ by 2 units in the last
place, and the moments by a few more."""


def not_updated(difference: Difference, context: Context) -> Finding | None:
    """A step left the value as it was (TE-3207: a rank's launch is dropped; ACC-3835: the optimizer holds orphans)."""
    key, pair = difference.key, context.pair(difference)
    if context.op_kind(key.op) != "step" or key.role not in ("param", "master", "exp_avg", "exp_avg_sq", "momentum"):
        return None
    before = context.expected.get(key._replace(op=key.op - 1))
    if difference.kind == "replica_conflict" and before is not None:
        return _copies_not_updated(key, before, context)
    if pair is None or before is None or not pair.explained_by(before):
        return None
    where = f" on ranks {list(difference.ranks)}" if difference.ranks else ""
    clause = f"{len(pair.at)} of {difference.total} elements of {tensor(key)} are as before {context.op_name(key.op)}"
    confidence = "likely" if pair.strength == "possible" else pair.strength
    return Finding(confidence, clause + where, {"name": key.fqn, "role": key.role, "ranks": list(difference.ranks)})


def _copies_not_updated(key: Key, before: Value, context: Context) -> Finding | None:
    """Of the copies of a value those that differ from what it must be are as they were before the step."""
    due = context.expected[key]
    if (due.dtype, due.shape) != (before.dtype, before.shape):
        return None
    ranks: list[int] = []
    left = 0
    for piece in context.pieces(key):
        at, own = elements_of(piece), as_bits(piece)
        if piece.dtype != due.dtype or len(own) != len(at):
            return None
        unlike = own != as_bits(due)[at]
        if not (own[unlike] == as_bits(before)[at][unlike]).all():
            return None
        if unlike.any():
            ranks.append(piece.rank)
            left += int(unlike.sum())
    if not ranks:
        return None
    clause = f"{tensor(key)} is as before {context.op_name(key.op)} on ranks {sorted(ranks)}, and not on others"
    confidence: Confidence = "certain" if left >= DISTINCT else "likely"
    return Finding(confidence, clause, {"name": key.fqn, "role": key.role, "ranks": sorted(ranks)})


def not_finite(difference: Difference, context: Context) -> Finding | None:
    """Finite values became infinite or NaN in a step."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or not pair.is_float or context.op_kind(key.op) != "step":
        return None
    broken = np.isfinite(pair.wanted) & ~np.isfinite(pair.got)
    if not broken.any() or not broken.all():
        return None
    clause = f"{len(broken)} of {difference.total} elements of {tensor(key)} are infinite or NaN after "
    return Finding("likely", clause + context.op_name(key.op), {"name": key.fqn, "role": key.role})


def continued_from(difference: Difference, context: Context) -> Finding | None:
    """The step started from an earlier value instead of the current one (MBR-3949, DS-762: stale masters win)."""
    return (
        _moved_from(difference, context)
        or _decayed_from(difference, context)
        or _right_update_of_another(difference, context)
    )


def _right_update_of_another(difference: Difference, context: Context) -> Finding | None:
    """Weights that differ from what they must be by as much as an earlier value differs from that of before the step:
    the update is right, and where it started is not."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or context.op_kind(key.op) != "step" or key.role not in ("param", "master") or not pair.is_float:
        return None
    current = context.expected.get(key._replace(op=key.op - 1))
    if current is None or current.shape != pair.expected.shape or distinct(pair.observed_bits) < DISTINCT:
        return None
    held = as_numbers(current)[pair.at].astype(np.float64)
    finite = np.isfinite(pair.wanted) & np.isfinite(pair.got) & np.isfinite(held)
    off = (pair.got - pair.wanted)[finite]
    rounding = ROUNDING.get(pair.expected.dtype, 2.0**-20) * (np.abs(pair.got) + np.abs(pair.wanted))[finite]
    decay = max(_decays(key, context))
    for index, value in context.earlier(key):
        if value.shape != current.shape:
            continue
        gone = as_numbers(value)[pair.at][finite].astype(np.float64) - held[finite]
        close = rounding + decay * np.abs(gone)
        if (np.abs(gone) > FAR * close).sum() >= DISTINCT and (np.abs(off - gone) <= close).all():
            clause = f"{tensor(key)} after {context.op_name(key.op)} is the right update of {moment(index, context)}, "
            clause += f"not of {moment(key.op - 1, context)}"
            return Finding("likely", clause, {"name": key.fqn, "role": key.role, "continued_from": index})
    return None


def _decayed_from(difference: Difference, context: Context) -> Finding | None:
    """A moment into which the decay of earlier weights went, where weight decay is a part of the gradient."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or key.role not in ("exp_avg", "momentum") or context.op_kind(key.op) != "step":
        return None
    role = "master" if key._replace(role="master") in context.expected else "param"
    last = Key(key.op - 1, "live", role, key.fqn)
    current = context.expected.get(last)
    if current is None or current.shape != pair.expected.shape or distinct(pair.observed_bits) < 3:
        return None
    held = as_numbers(current)[pair.at].astype(np.float64)
    close = roughly(pair.expected.dtype) * np.abs(pair.got - pair.wanted).max() + 2.0**-22 * np.abs(pair.wanted).max()
    keeps = context.settings(MOMENTS[key.role], last.op)
    shares = {1 - kept for kept in keeps} if key.role == "exp_avg" else {1.0}
    decays = {share * decay for share in shares for decay in context.settings("weight_decay", last.op) if decay}
    for share, (index, value, run) in product(decays, _held_before(last._replace(op=key.op), context)):
        if value.shape != current.shape:
            continue
        with np.errstate(invalid="ignore"):  # infinities, which some models have on purpose
            gone = share * (as_numbers(value)[pair.at].astype(np.float64) - held)
            off = np.abs(pair.wanted + gone - pair.got).max()
        if gone.any() and off <= close:
            clause = (
                f"{tensor(key)} after {context.op_name(key.op)} took in the weight decay that {role} would have with "
            )
            clause += f"{moment(index, context)}{run}"
            return Finding("likely", clause, {"name": key.fqn, "role": role, "continued_from": index})
    return None


def _moved_from(difference: Difference, context: Context) -> Finding | None:
    """Weights that are further from what they were before a step than any step moves them, and near an earlier
    value."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or context.op_kind(key.op) != "step" or key.role not in ("param", "master") or len(pair.at) < 3:
        return None
    far = STEP_RADIUS * context.scenario.optimizer.lr
    distances = {i: _farthest(as_numbers(value)[pair.at], pair.got) for i, value in context.earlier(key)}
    if distances.get(key.op - 1, 0.0) <= far:
        return None
    distance, start = min((distance, index) for index, distance in distances.items())
    if not distance <= far:  # also where the distance is NaN
        return None
    clause = f"{tensor(key)} after {context.op_name(key.op)} is one update away from {moment(start, context)}, "
    clause += f"not from {moment(key.op - 1, context)}"
    return Finding("likely", clause, {"name": key.fqn, "role": key.role, "continued_from": start})


def moment_continued_from(difference: Difference, context: Context) -> Finding | None:
    """A moment took in its gradient, and decayed an earlier value of its own instead of the current one (MLM-VERL4870:
    two views of one state)."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or key.role not in MOMENTS or context.op_kind(key.op) != "step" or distinct(pair.observed_bits) < 3:
        return None
    before = key._replace(op=key.op - 1)
    current = context.expected.get(before)
    if current is None or context.observed.get(before) != current or current.shape != pair.expected.shape:
        return None
    held = as_numbers(current)[pair.at].astype(np.float64)
    close = roughly(pair.expected.dtype) * np.abs(pair.wanted).max()
    decays = context.settings(MOMENTS[key.role], before.op)
    for decay, (index, value, run) in product(decays, _held_before(key, context)):
        if (value.dtype, value.shape) != (current.dtype, current.shape):
            continue
        stale = pair.wanted + decay * (as_numbers(value)[pair.at].astype(np.float64) - held)
        if np.abs(stale - pair.got).max() <= close:
            clause = f"{tensor(key)} after {context.op_name(key.op)} goes on from {moment(index, context)}{run}, "
            clause += f"not from {moment(before.op, context)}"
            return Finding("likely", clause, {"name": key.fqn, "continued_from": index})
    return None


def _held_before(key: Key, context: Context) -> Iterator[tuple[int, Value, str]]:
    """`(operation, value, in which run)` of what a tensor was before its last operation, latest first; of the run in
    which no load did anything too."""
    for index, value in context.earlier(key):
        if index < key.op - 1:
            yield index, value, ""
    for index in range(key.op - 1, -1, -1):
        held = context.cold.get(Key(index, "live", key.role, key.fqn))
        if held is not None:
            yield index, held, " in the run without a load"


def _farthest(values: npt.NDArray[np.generic], got: Floats) -> float:
    return float(np.abs(values.astype(np.float64) - got).max())


def weight_decay(difference: Difference, context: Context) -> Finding | None:
    """The weights are off by one application of decoupled weight decay (PT-125708: an initialising step decays)."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or key.role not in ("param", "master") or not pair.is_float or len(pair.at) < 3:
        return None
    before = context.expected.get(key._replace(op=key.op - 1)) if context.op_kind(key.op) == "step" else pair.expected
    if before is None or before.shape != pair.expected.shape:
        return None
    base = as_numbers(before)[pair.at].astype(np.float64)
    rounding = ROUNDING.get(pair.expected.dtype, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):  # zeros, and infinities, which some models have on purpose
        excess = (pair.wanted - pair.got) / base
    hows = ((1, "once too often"), (-1, "once too little"))
    for amount, (times, how) in product(_decays(key, context), hows):
        close = amount * 0.05 + rounding
        near = amount > 2 * rounding and base.all() and (np.abs(excess - times * amount) <= close).all()
        if near or (before is pair.expected and _is_decayed(pair, times * amount)):
            clause = f"{tensor(key)} was decayed {how} by {context.op_name(key.op)}"
            return Finding("likely", clause, {"name": key.fqn, "lr_times_decay": amount, "times": times})
    return None


def _is_decayed(pair: Pair, amount: float) -> bool:
    """Whether every element is the right one, less a share of it, rounded: where a decay is less than a rounding it
    shows in some elements only."""
    own = as_numbers(pair.expected)
    with np.errstate(invalid="ignore"):
        decayed = (own.astype(np.float64) * (1 - amount)).astype(own.dtype)
    return decayed.tobytes() == pair.observed.data


def _decays(key: Key, context: Context) -> list[float]:
    """What a step may take off a weight, as a share of it: by the scenario's hyperparameters, by those that a later
    build begins with, which a step inside of a load still has, and by those that groups have, which a schedule sets."""
    group, asked, op = _group(key.fqn, context), context.scenario.optimizer, context.op(key.op)
    found = dict.fromkeys((asked, asked.at_build(op.init_seed) if op else asked))
    amounts = [
        o.lr * group.lr_scale * (o.weight_decay if group.weight_decay is None else group.weight_decay) for o in found
    ]
    return list(dict.fromkeys((*amounts, *_decays_of_groups(key.op - 1, context), *_decays_of_groups(key.op, context))))


def _decays_of_groups(index: int, context: Context) -> Iterator[float]:
    """Learning rate times weight decay of every param group after an operation."""
    settings = context.of_role(Key(index, "live", "hyperparameter", ""))
    for name, value in settings.items():
        if name.endswith(".lr"):
            decay = settings.get(f"{name.removesuffix('.lr')}.weight_decay")
            if decay is not None:
                yield float(as_numbers(value)[0]) * float(as_numbers(decay)[0])


def _group(fqn: str, context: Context) -> GroupSpec:
    """The overrides of the group that the parameter is in."""
    known = next((p for p in context.model.params if p.fqn == fqn), None)
    if known is None or context.scenario.optimizer.groups == "one":
        return GroupSpec()
    return context.model.groups[known.spec.group]


def other_kernel(difference: Difference, context: Context) -> Finding | None:
    """All deviations are within a few units in the last place: another kernel or another order, not other data."""
    if difference.kind != "bits" or difference.max_ulp is None or difference.nan_mismatches:
        return None
    if not 0 < difference.max_ulp <= KERNEL_ULPS or context.op_kind(difference.key.op) != "step":
        return None
    pair = context.pair(difference)
    if pair is not None and not pair.is_float:
        return None  # a count that is off by one is no rounding
    gradient = difference.key._replace(role="grad")
    if context.expected.get(gradient) != context.observed.get(gradient):
        return None  # the gradient differs already, and this follows from it
    clause = f"{tensor(difference.key)} is off by at most {difference.max_ulp} ULP in {difference.mismatched} of "
    clause += f"{difference.total} elements after {context.op_name(difference.key.op)}"
    return Finding("likely", clause, {"name": difference.key.fqn, "max_ulp": difference.max_ulp})


RULES = (
    Rule(
        "not_updated",
        "The step did not reach everything",
        not_updated,
        ("TE-3207", "ACC-3835", "PT-176076", "ACC-3979"),
    ),
    Rule("not_finite", "Finite values became infinite or NaN", not_finite, ()),
    Rule(
        "continued_from",
        "An update started from stale weights",
        continued_from,
        ("MBR-3949", "MLM-5071", "MLM-7449a", "MLM-mr2871", "DS-762"),
    ),
    Rule(
        "moment_continued_from",
        "A moment went on from an earlier value of its own",
        moment_continued_from,
        ("MLM-VERL4870",),
    ),
    Rule("weight_decay", "Weight decay was not applied as often as steps were taken", weight_decay, ("PT-125708",)),
    Rule("other_kernel", "The arithmetic was rounded differently", other_kernel, ("DS-7982",)),
)
