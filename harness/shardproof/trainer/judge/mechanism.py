"""What may have made a difference between two arms, where the values alone show it.

A trainer has no contract, so that none of the rules for systems can ask what the right value is made of. But an arm has
two values of everything, and some mistakes can be read off them:

    unwritten    a schedule holds the right learning rate, and the optimizer another one, as the schedule's first
    drawn        a generator of torch has another seed, or another place in its stream
    still        parameters do not move that should, or move that should not
    rearranged   the same elements in another order: parts of a tensor that were put together wrongly
    rounded      the expected values, rounded to bf16 or fp16 on the way
    zeros        nothing but zeros
    exchanged    the value of another tensor
    scaled       every gradient times one factor, in all tensors alike, in some, or in each rank's rows by one of its
                 own: what scales gradients, such as the norm that they are clipped by
                 (`shardproof.trainer.values.scaled`)
    variance     what a running variance takes in, by the factor of `n` and `n - 1`
                 (`shardproof.trainer.values.variance`)
    moved        the same elements some places further, as of a flat buffer that was cut at other places
    some         the gradients of some parameters, which the order in the model tells from the others

The first two are said of one value, whatever else differs. Any other counts only where it explains all tensors that
differ, and where chance cannot: enough different elements.

*Verifies*: that the mechanism makes exactly these values; `scaled`, that one factor makes them up to a thousandth.
*Does not verify*: that nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.arrangement import DISTINCT, distinct, exchanged_dims, order_name, slice_order
from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.assemble import as_bits
from shardproof.observe.logical import Value
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.trainer.values.every_mesh import ALIKE_ROLES, Name, without_rank
from shardproof.trainer.values.gradients import GRADIENT, are_frozen, why_still
from shardproof.trainer.values.pairs import Between, Pair
from shardproof.trainer.values.rates import ZERO, of_rates, rates_in
from shardproof.trainer.values.rounding import FLOATS
from shardproof.trainer.values.scaled import CHANGED, in_common, scaled
from shardproof.trainer.values.streams import of_streams
from shardproof.trainer.values.variance import of_variances
from shardproof.trainer.values.wording import called

HALVES = ("bf16", "fp16")
FP32 = "fp32"


def mechanism(found: Sequence[Difference], between: Between) -> str:
    """A sentence about what may have made all of these differences; empty where nothing is recognised."""
    before = between.before if between.loaded else {}
    told = of_streams(found, between.expected, between.observed, between.seed)
    told = told or of_rates(found, between.expected, between.observed, before)
    return _measured(told or _made(found, between), between)


def _made(found: Sequence[Difference], between: Between) -> str:
    """What made the values of tensors."""
    every = [between.pair(difference) for difference in found]
    pairs = [pair for pair in every if pair is not None]
    beside = [one for one, pair in zip(found, every, strict=True) if pair is None]
    if not pairs or not all(_is_beside(one, between) for one in beside):
        return ""
    if max(distinct(as_bits(pair.observed)) for pair in pairs) < DISTINCT:
        return "" if any(as_bits(pair.observed).any() for pair in pairs) else "All of these values are zeros."
    return next(filter(None, (rule(pairs, between) for rule in RULES)), "")


def _is_beside(one: Difference, between: Between) -> bool:
    """Whether a difference is of a number or a count, which follows from what the tensors say, or is told elsewhere."""
    name = one.key.role, one.key.fqn
    values = between.expected.get(name), between.observed.get(name)
    return one.kind == "bits" and all(value is not None and value.dtype not in FLOATS for value in values)


def _measured(told: str, between: Between) -> str:
    if not told or not between.against:
        return told
    told = told.replace("what it should be", f"that with {between.against}")
    return f"Measured against {between.against}: {told[0].lower()}{told[1:]}"


def _rearranged(pairs: Sequence[Pair], between: Between) -> str:
    if not all(np.array_equal(np.sort(as_bits(p.expected)), np.sort(as_bits(p.observed))) for p in pairs):
        return ""
    if turned := next(filter(None, map(_turned, pairs)), ""):
        return f"The elements are the right ones in another order, of {turned}."
    where = next(filter(None, (_order(pair, between.ranks) for pair in pairs)), "")
    return f"The elements are the right ones in another order{where}: parts of a tensor are put together wrongly."


MOST_DIMS = 5
"""Of a tensor whose dims may be in another order."""

CHANNELS_LAST = ((0, 2, 3, 1), (0, 3, 1, 2), (0, 2, 3, 4, 1), (0, 4, 1, 2, 3))
"""The order of dims in memory format channels_last, and back, of images and of volumes."""


def _turned(pair: Pair) -> str:
    """In which order a tensor has its dims, and where to look; empty where it has them in none."""
    shape = pair.expected.shape
    wanted, got = (as_bits(value).reshape(shape) for value in (pair.expected, pair.observed))
    if dims := exchanged_dims(wanted, got):
        return f"{pair.name[1]} with dims {dims[0]} and {dims[1]} exchanged: {STRIDES}"
    for order in permutations(range(len(shape))) if len(shape) <= MOST_DIMS else ():
        both = (wanted, got), (got, wanted)
        if any(np.array_equal(np.transpose(one, order).reshape(-1), other.reshape(-1)) for one, other in both):
            named = ", as memory format channels_last has them" if order in CHANNELS_LAST else ""
            return f"{pair.name[1]} with dims in the order {', '.join(map(str, order))}{named}: {STRIDES}"
    return ""


STRIDES = "look at a transpose, and at what takes or fills a tensor's memory without regard to its strides"
"""Where dims come into another order."""


def _order(pair: Pair, ranks: int) -> str:
    """In which order, where whole slices are exchanged."""
    shape = pair.expected.shape
    wanted, got = (as_bits(value).reshape(shape) for value in (pair.expected, pair.observed))
    for dim in range(len(shape)):
        order = slice_order(np.moveaxis(wanted, dim, 0), np.moveaxis(got, dim, 0))
        if order:
            named = order_name(order, {ranks, 2})
            few = named or (", ".join(map(str, order)) if len(order) <= 16 else "")
            return f", of {pair.name[1]} along dim {dim}" + (f": {few}" if few else "")
    return ""


def _rounded(pairs: Sequence[Pair], between: Between) -> str:
    for half in HALVES:
        if all(_same(p.observed, _through(p.expected, half)) for p in pairs):
            return f"The values are the right ones, rounded to {half} on the way."
    return ""


def _through(value: Value, half: str) -> npt.NDArray[np.generic]:
    numbers = as_numbers(value)
    with np.errstate(over="ignore"):
        return numbers.astype(numpy_dtype(half)).astype(numbers.dtype)


def _exchanged(pairs: Sequence[Pair], between: Between) -> str:
    telling = [pair for pair in pairs if distinct(as_bits(pair.observed)) >= DISTINCT]
    sources = [(pair.name, _source(pair, between)) for pair in telling]
    found = [(name, source) for name, source in sources if source is not None]
    if not found or len(found) < MOST_OF * len(telling):
        return ""
    (role, name), (source, half) = found[0]
    more = f", rounded to {half}" if half else ""
    more += f" ({len(found)} of {len(telling)} tensors)" if len(found) < len(telling) else ""
    if source[0] == role and source[1] != name and without_rank(source[1]) == without_rank(name):
        return (
            f"Ranks have each other's values: {name} has that of {source[1]}. What every rank has of its own is saved, "
            "or loaded, under one name for all: give each rank's a name of its own, or the tensor its place."
        )
    if source[0] == role:
        return f"The values are those of other tensors: {name} has that of {source[1]}{more}."
    if source[1] == name:
        return f"The values are those of other tensors: {role} of {name} has its {source[0]}{more}."
    return f"The values are those of other tensors: {role} of {name} has that of {called(*source)}{more}."


def _source(pair: Pair, between: Between) -> tuple[Name, str] | None:
    """Which tensor has the observed value, and the dtype that it was rounded to on the way: one of the same role, or
    of the same parameter, where there is one."""
    role, name = pair.name
    alike = {key: value for key, value in between.expected.items()
             if key != pair.name and key[0] in (*ALIKE_ROLES, role, EXTRA_STATE)}  # fmt: skip
    beside = dict(sorted(alike.items(), key=lambda one: (one[0][0] != role, one[0][1] != name)))
    for key, value in beside.items():
        if value == pair.observed:
            return key, ""
    floats = {
        key: value for key, value in beside.items()
        if value.dtype == pair.observed.dtype == FP32 and value.shape == pair.observed.shape
    }  # fmt: skip
    rounded = ((key, half) for half in HALVES for key, value in floats.items()
               if _same(pair.observed, _through(value, half)))  # fmt: skip
    return next(rounded, None)


def _still(pairs: Sequence[Pair], between: Between) -> str:
    if between.loaded:  # which moves no parameter, and has no gradients
        return ""
    params = [pair for pair in pairs if pair.name[0] == "param" and pair.before is not None]
    moved = [[_moves(pair.before, value) for value in (pair.expected, pair.observed)] for pair in params]
    if not moved or any(one == other for one, other in moved) or len({one for one, _ in moved}) > 1:
        return ""
    should, every = moved[0][0], sum(name[0] == "param" for name in between.expected)
    if len(moved) < every:
        which = f"{len(moved)} of {every} parameters " + ("should change here, and do not" if should else
                                                          "change here, and should not")  # fmt: skip
    else:
        which = "Parameters " + ("should change here, and none does" if should else "change here, and none should")
    zero = [] if ZERO & rates_in(between.expected) else sorted(
        ZERO & (rates_in(between.observed) | rates_in(between.settings))
    )  # fmt: skip
    if should and zero:
        return f"{which}: a learning rate is {zero[0].decode().rpartition(' ')[2]} here."
    names = [pair.name[1] for pair in params]
    if not should and are_frozen(names, between.gradients):
        return f"{which}: they are frozen (`requires_grad` is False). {MOVED}"
    if not should and all(between.gradients.get(name) == GRADIENT for name in names):
        return f"{which}: {TRAINABLE}"
    if not should:
        return f"{which}. {MOVED}"
    rate = "" if rates_in(between.settings) - ZERO else ", and at the rate"
    seen = why_still(names, between.gradients)
    return f"{which}: {seen or f'look at what skips a step, and at gradients that are zero or do not arrive{rate}'}."


TRAINABLE = (
    "an optimizer steps them here, with gradients other than zero. Look at what sets `requires_grad`, such as a "
    "wrapper or the load of an adapter, and at which parameters the optimizer is given."
)
MOVED = (
    "Look at weight decay, at moments from before, and at a copy of the parameters in another dtype that the optimizer "
    "steps and that is written back."
)


def _moves(before: Value | None, after: Value) -> bool:
    return before is not None and before.data != after.data


def _same(value: Value, numbers: npt.NDArray[np.generic]) -> bool:
    return value.data == numbers.tobytes()


def _moved(pairs: Sequence[Pair], between: Between) -> str:
    """All tensors of a role as one vector, in the model's order, and its elements a few places further, as of a flat
    buffer that was cut into pieces at other places than it was written in."""
    told = set[tuple[int, ...]]()
    for role in dict.fromkeys(pair.name[0] for pair in pairs):
        names = [name for name in between.expected if name[0] == role and name in between.observed]
        values = [(between.expected[name], between.observed[name]) for name in names]
        if any((one.dtype, one.shape) != (other.dtype, other.shape) for one, other in values):
            return ""
        wanted, got = (
            np.concatenate([as_bits(value).reshape(-1) for value in each]) for each in zip(*values, strict=True)
        )
        told.add(_moves_of(wanted, got, between.ranks))
    moves = told.pop() if len(told) == 1 else ()
    if not moves:
        return ""
    where = _places(moves[0]) if len(moves) == 1 else ", ".join(
        f"{_places(by)} in part {number + 1} of {len(moves)}" for number, by in enumerate(moves) if by
    )  # fmt: skip
    return (
        f"The elements are the right ones, {where}, if the tensors are taken as one vector in the model's order: look "
        "at where a flat buffer is cut into pieces, and at how each piece is padded."
    )


def _places(by: int) -> str:
    where = "further on" if by > 0 else "further to the front"
    return f"{abs(by)} place{'s' if abs(by) > 1 else ''} {where}"


def _moves_of(wanted: npt.NDArray[Any], got: npt.NDArray[Any], ranks: int) -> tuple[int, ...]:
    """By how many places the elements of a vector have moved: one number, or else one for each rank's part of it, 0
    where a part is right; empty where that does not explain them."""
    wrong = np.flatnonzero(wanted != got)
    if by := next((by for by in MOVES if _is_moved(wanted, got, wrong, by)), 0):
        return (by,)
    size = -(-len(wanted) // ranks)
    parts = [wrong[(wrong >= rank * size) & (wrong < (rank + 1) * size)] for rank in range(ranks)]
    found = [next((by for by in MOVES if _is_moved(wanted, got, part, by)), 0) for part in parts]
    explained = all(by or not len(part) for by, part in zip(found, parts, strict=True))
    return tuple(found) if explained and any(found) else ()


MOVES = [by for size in range(1, 9) for by in (size, -size)]
"""By how many places elements are looked for elsewhere."""

MOST_OF = 0.8
"""The share of the wrong elements that a move has to explain: at the ends of pieces others stand."""


def _is_moved(wanted: npt.NDArray[Any], got: npt.NDArray[Any], wrong: npt.NDArray[Any], by: int) -> bool:
    """Whether most of the wrong elements are those that should stand so many places before."""
    inside = wrong[(wrong - by >= 0) & (wrong - by < len(wanted))]
    if len(inside) < DISTINCT or len(np.unique(got[inside])) < DISTINCT:
        return False
    return float((got[inside] == wanted[inside - by]).sum()) >= MOST_OF * len(wrong)


def _some(pairs: Sequence[Pair], between: Between) -> str:
    """Some parameters have wrong gradients, and others right ones, where the order in the model tells the two apart."""
    role = next((role for role in CHANGED if any(pair.name[0] == role for pair in pairs)), "")
    wrong = {pair.name[1] for pair in pairs if pair.name[0] == role}
    every = [name for kind, name in between.expected if kind == role]
    right = [name for name in between.moved(role) if name not in wrong]
    if between.loaded or between.rates_differ or between.step < 0 or role not in CHANGED[:2] or not right or not wrong:
        return ""
    told = f"{len(wrong)} of {len(every)} parameters got other gradients{in_common(sorted(wrong), right)}"
    few = f"{', '.join(right[:3])}{', …' if len(right) > 3 else ''}"
    if between.known:
        return f"{told}, and {few} the right ones."
    if every[-len(right) :] == right:
        return (
            f"{told}, and {few}, registered last in the model, the right ones: look at the gradient that the backward "
            f"hands on from {right[0]} to what is before it."
        )
    return f"{told}, and {few} the right ones: look at what the backward does to those alone."


Rule = Callable[[Sequence[Pair], Between], str]

RULES: tuple[Rule, ...] = (_still, _rearranged, _rounded, _exchanged, of_variances, scaled, _moved, _some)
"""From specific to general."""
