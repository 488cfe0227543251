"""Rules about a part of a tensor whose values are neither right nor another tensor's: a checkpoint of two saves, memory
that nobody wrote, a step of another length, and arithmetic that went wrong on one stretch.

Other rules find a wrong value somewhere else: under another name, at another place, at another moment. Here there is
no such place, or only for a part. For example, a writer is killed in the middle of its second save: the files of one
rank are of the first save, those of the others of the second, and a load joins both without a word.

*Verifies*: bits of a save that is torn; of a step, that every deviating element went the same number of times as far
as it should, within the rounding of its dtype.
*Does not verify*: what filled memory that nobody wrote, and which instruction was wrong in a stretch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.arrangement import DISTINCT, distinct
from shardproof.diagnosis.explanation import Confidence, Context, Finding, Floats, Rule, tensor
from shardproof.diagnosis.rules.sources import listed
from shardproof.diagnosis.rules.updates import ROUNDING
from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.assemble import as_bits, elements_of
from shardproof.observe.logical import Key, Value
from shardproof.observe.record import WRITTEN
from shardproof.program import TAKES

UPDATED = ("param", "master", "exp_avg", "exp_avg_sq", "momentum")
"""Roles that a step writes."""

EXPONENTS = 32
"""So many powers of two must lie between the smallest and the largest of values that nobody wrote: bits at random have
any exponent, while what a run computes lies close together."""

BEYOND = 2.0**20
"""How far outside of all values of its role a value must lie to be one that no step makes."""

UNLIKE = 2.0**-6
"""A step that goes another number of times as far differs from once by more than this; less is another rounding."""

STRANGE = 8
"""So many values that no step makes are no coincidence."""


def torn_save(difference: Difference, context: Context) -> Finding | None:
    """A part of what was saved, or was loaded of it, is of an earlier save: that of whole ranks, or some tensors of a
    role of which others are of the right one.

    State that was in memory before a load is no evidence: then the load may have left it there.
    """
    key, pair = difference.key, context.pair(difference)
    if pair is None or not _reads_or_writes(key, context):
        return None
    for index, value in _earlier_saves(key, context):
        if not pair.explained_by(value) or _there_already(key, value, context):
            continue
        then, now = context.ops[index].iteration, context.ops[_asked_for(key, context)].iteration
        evidence = {"name": key.fqn, "role": key.role, "of_step": then, "save_of_step": now}
        ranks = _whole_ranks(key, value, context)
        if ranks:
            clause = f"of {tensor(key)} after {context.op_name(key.op)}, what rank {listed(ranks)} wrote is of step "
            clause += f"{then}, and the rest of step {now}"
            return Finding(pair.strength, clause, {**evidence, "ranks": ranks})
        if _others_are_right(key, index, context):
            clause = f"{tensor(key)} after {context.op_name(key.op)} is of step {then}, and others of step {now}"
            return Finding("likely", clause, evidence)
    return None


def _reads_or_writes(key: Key, context: Context) -> bool:
    kind = context.op_kind(key.op)
    return kind.startswith("load") if key.where == "live" else key.where == WRITTEN and kind in TAKES


def _asked_for(key: Key, context: Context) -> int:
    """The operation that took the state which a save writes, or a load must restore; of those with equal values the
    last."""
    if key.where == WRITTEN:
        return context.taken(key)
    taken = [i for i in range(key.op - 1, -1, -1) if context.op_kind(i) in TAKES]
    due = context.expected[key]
    return next((i for i in taken if context.expected.get(Key(i, "live", key.role, key.fqn)) == due), taken[0])


def _earlier_saves(key: Key, context: Context) -> Iterator[tuple[int, Value]]:
    """`(operation, expected value)` of the saves before the one in question, latest first."""
    taken = [i for i in range(key.op) if context.op_kind(i) in TAKES]
    own = _asked_for(key, context) if taken else 0
    for index in (i for i in reversed(taken) if i < own):
        value = context.expected.get(Key(index, "live", key.role, key.fqn))
        if value is not None:
            yield index, value


def _there_already(key: Key, value: Value, context: Context) -> bool:
    """Whether a value was in memory just before a load."""
    return key.where == "live" and context.expected.get(key._replace(op=key.op - 1)) == value


def _whole_ranks(key: Key, value: Value, context: Context) -> list[int]:
    """The ranks whose whole share, as it was saved, is the earlier value, while all others have what they must; empty
    where shares are mixed."""
    due, held = context.expected[key], context.observed[key]
    wanted, got, before = as_bits(due), as_bits(held), as_bits(value)
    old, new = [], []
    for piece in context.pieces(key if key.where == WRITTEN else key._replace(op=_asked_for(key, context))):
        at = elements_of(piece)
        if np.array_equal(got[at], wanted[at]):
            new.append(piece.rank)
        elif np.array_equal(got[at], before[at]):
            old.append(piece.rank)
        else:
            return []
    return sorted(set(old)) if new and not set(old) & set(new) else []


def _others_are_right(key: Key, index: int, context: Context) -> bool:
    """Whether some other tensor of the role is right, and is another one than at the earlier save."""
    for other, due in context.siblings(key):
        before = context.expected.get(Key(index, "live", other.role, other.fqn))
        if context.observed.get(other) == due and before is not None and before != due:
            return True
    return False


def unwritten_memory(difference: Difference, context: Context) -> Finding | None:
    """Values that no step makes: of any exponent, most of them far outside of all that the role ever held, or NaN.
    Memory was handed out that nobody had filled."""
    key, wrong = difference.key, _wrong_values(difference, context)
    sizes = np.abs(wrong)
    real = sizes[np.isfinite(sizes) & (sizes > 0)]
    if len(real) < 2 or np.log2(real.max()) - np.log2(real.min()) < EXPONENTS:
        return None
    least, most = _range_of_role(key, context)
    with np.errstate(invalid="ignore"):
        strange = ~np.isfinite(sizes) | (sizes > most * BEYOND) | ((sizes > 0) & (sizes < least / BEYOND))
    if strange.sum() < DISTINCT or strange.mean() < 0.5:
        return None
    clause = f"{len(sizes)} elements of {tensor(key)} after {context.op_name(key.op)} lie between {real.min():.2g} and "
    clause += f"{real.max():.2g}, where none must be beyond {most:.2g}"
    sure: Confidence = "certain" if strange.sum() >= STRANGE else "likely"
    return Finding(sure, clause, {"name": key.fqn, "role": key.role, "elements": len(sizes)})


def _wrong_values(difference: Difference, context: Context) -> Floats:
    """The different numbers that a tensor has where it must have others, on whichever rank."""
    pair, due = context.pair(difference), context.expected.get(difference.key)
    if pair is not None:
        return np.unique(pair.got) if pair.is_float else np.zeros(0)
    if difference.kind != "replica_conflict" or due is None or not due.dtype.startswith(("fp", "bf")):
        return np.zeros(0)
    found = [np.zeros(0)]
    for piece in context.pieces(difference.key):
        at = elements_of(piece)
        if piece.dtype == due.dtype and len(as_bits(piece)) == len(at):
            unlike = as_bits(piece) != as_bits(due)[at]
            held = np.frombuffer(piece.data, numpy_dtype(piece.dtype))
            found.append(held[unlike].astype(np.float64))
    return np.unique(np.concatenate(found))


def _range_of_role(key: Key, context: Context) -> tuple[float, float]:
    """The smallest and the largest absolute value, but for zero, that a role must ever have."""

    def make() -> tuple[float, float]:
        of_role = [value for other, value in context.expected.items() if other.role == key.role]
        sizes = np.concatenate([np.abs(as_numbers(value).astype(np.float64)).reshape(-1) for value in of_role])
        real = sizes[np.isfinite(sizes) & (sizes > 0)]
        return (float(real.min()), float(real.max())) if len(real) else (1.0, 1.0)

    return context.once(("range", key.role), make)


def moved_by_a_factor(difference: Difference, context: Context) -> Finding | None:
    """Every deviating weight went the same number of times as far as it should, from the right place: the learning rate
    of another group, no correction for bias, or a divisor that was forgotten where the update does not divide it out
    again."""
    key, pair = difference.key, context.pair(difference)
    before = _before(key, context)
    if pair is None or before is None or key.role not in ("param", "master") or not pair.is_float:
        return None
    held = as_numbers(before)[pair.at].astype(np.float64)
    due, gone = pair.wanted - held, pair.got - held
    slack = ROUNDING.get(pair.expected.dtype, 2.0**-23) * np.maximum(np.abs(pair.got), np.abs(held))
    clear = np.abs(due) > 8 * slack
    if not np.isfinite(gone).all() or clear.sum() < DISTINCT or distinct(pair.observed_bits) < DISTINCT:
        return None
    factor = float(np.median(gone[clear] / due[clear]))
    if abs(factor - 1) < UNLIKE or abs(factor) < UNLIKE or not _goes(factor, due, gone, slack):
        return None
    few = "" if len(pair.at) == difference.total else f"{len(pair.at)} of {difference.total} elements of "
    clause = f"{few}{tensor(key)} went {factor:.4g} times as far as {context.op_name(key.op)} must move them"
    return Finding("likely", clause, {"name": key.fqn, "role": key.role, "factor": factor})


def _goes(factor: float, due: Floats, gone: Floats, slack: Floats) -> bool:
    return bool((np.abs(gone - factor * due) <= slack * (1 + abs(factor))).all())


def _before(key: Key, context: Context) -> Value | None:
    """What a tensor was before a step, if that was right; None where it is no step's, or has another shape."""
    if context.op_kind(key.op) != "step" or key.where != "live":
        return None
    before, due = key._replace(op=key.op - 1), context.expected.get(key)
    value = context.expected.get(before)
    if value is None or due is None or value.shape != due.shape or context.observed.get(before, value) != value:
        return None
    return value


def part_of_a_step(difference: Difference, context: Context) -> Finding | None:
    """A step is wrong on one stretch of a tensor, or on the share of some ranks, and right everywhere else, though what
    it started from and the gradient are right: a kernel that treats its last block otherwise, a rank with another
    setting."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or key.role not in UPDATED or _before(key, context) is None or len(pair.at) == difference.total:
        return None
    gradient = key._replace(role="grad")
    if context.observed.get(gradient) != context.expected.get(gradient):
        return None
    shares = _shares_of_ranks(key, pair.at, context)
    run = len(pair.at) == pair.at[-1] - pair.at[0] + 1 and len(pair.at) > 1
    if not shares and not run:
        return None
    which = f"the share of rank {listed(shares)} is" if shares else f"elements {pair.at[0]} to {pair.at[-1]} are"
    clause = f"of {tensor(key)} {which} wrong after {context.op_name(key.op)}, and everything else is right"
    sure: Confidence = "likely" if distinct(pair.observed_bits) >= DISTINCT else "possible"
    return Finding(sure, clause, {"name": key.fqn, "role": key.role, "ranks": shares, "elements": len(pair.at)})


def _shares_of_ranks(key: Key, at: npt.NDArray[np.intp], context: Context) -> list[int]:
    """The ranks whose shares together are exactly the given elements; empty if they are no such."""
    wrong, found, covered = set(at.tolist()), [], set()
    for piece in context.pieces(key):
        own = set(elements_of(piece).tolist())
        if own and own <= wrong:
            found.append(piece.rank)
            covered |= own
    return sorted(set(found)) if covered == wrong else []


FIRST = (
    Rule("torn_save", "The checkpoint is put together from two saves", torn_save),
    Rule("unwritten_memory", "Memory that nobody had written was taken for values", unwritten_memory),
)
"""Before the rules about infinite values and about earlier ones, of which these are the closer description."""

RULES = (
    Rule("moved_by_a_factor", "The step moved weights by another factor", moved_by_a_factor),
    Rule("part_of_a_step", "The step went wrong on a part of a tensor", part_of_a_step),
)
"""After the rules that know why a step is wrong."""
