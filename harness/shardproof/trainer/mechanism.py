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
    scaled       every change times one factor, in all tensors alike or in each rank's rows by one of its own: what
                 scales gradients as a whole, such as the norm that they are clipped by

The first two are said of one value, whatever else differs. Any other counts only where it explains all tensors that
differ, and where chance cannot: enough different elements.

*Verifies*: that the mechanism makes exactly these values; `scaled`, that one factor makes them up to a thousandth.
*Does not verify*: that nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.arrangement import DISTINCT, distinct, exchanged_dims, order_name, slice_order
from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.assemble import as_bits
from shardproof.observe.logical import Value
from shardproof.trainer.every_mesh import ALIKE_ROLES, Name
from shardproof.trainer.rates import ZERO, of_rates, rates_in
from shardproof.trainer.rounding import FLOATS
from shardproof.trainer.streams import of_streams

Floats = npt.NDArray[np.float64]

HALVES = ("bf16", "fp16")

CHANGED = ("exp_avg", "momentum", "param")
"""Roles whose changes are a gradient's share, the one that is closest to the gradient first."""

NEAR = 2.0**-9
"""How near to one factor a change must be, as a share of the largest one, and how far from 1 the factor."""


@dataclass(frozen=True)
class Pair:
    """A tensor with its expected and its observed value, and the value before the operation, which may be None."""

    name: Name
    expected: Value
    observed: Value
    before: Value | None


@dataclass(frozen=True)
class Between:
    """Two moments that were compared.

    * before: what there was before both. ranks: how many ranks the arm has. loaded: whether a load is between.
    * against: what the expected moment is of, such as `offload=none`, where nobody knows which of the two is right.
    """

    expected: Mapping[Name, Value]
    observed: Mapping[Name, Value]
    before: Mapping[Name, Value]
    ranks: int
    against: str = ""
    loaded: bool = False

    def pair(self, difference: Difference) -> Pair | None:
        """The two values of a tensor of floats that differ in their bits; None for any other difference."""
        name = difference.key.role, difference.key.fqn
        one, other = self.expected.get(name), self.observed.get(name)
        if difference.kind != "bits" or name[0] not in ALIKE_ROLES or one is None or other is None:
            return None
        alike = (one.dtype, one.shape) == (other.dtype, other.shape) and one.dtype in FLOATS
        return Pair(name, one, other, self.before.get(name)) if alike else None


def mechanism(found: Sequence[Difference], between: Between) -> str:
    """A sentence about what may have made all of these differences; empty where nothing is recognised."""
    before = between.before if between.loaded else {}
    told = of_streams(found, between.expected, between.observed)
    told = told or of_rates(found, between.expected, between.observed, before)
    return _measured(told or _made(found, between), between)


def _made(found: Sequence[Difference], between: Between) -> str:
    """What made the values of tensors."""
    every = [between.pair(difference) for difference in found]
    pairs = [pair for pair in every if pair is not None]
    if not pairs or len(pairs) < len(every):
        return ""
    if max(distinct(as_bits(pair.observed)) for pair in pairs) < DISTINCT:
        return "" if any(as_bits(pair.observed).any() for pair in pairs) else "All of them are zeros."
    return next(filter(None, (rule(pairs, between) for rule in RULES)), "")


def _measured(told: str, between: Between) -> str:
    return f"Measured against {between.against}: {told[0].lower()}{told[1:]}" if told and between.against else told


def _rearranged(pairs: Sequence[Pair], between: Between) -> str:
    if not all(np.array_equal(np.sort(as_bits(p.expected)), np.sort(as_bits(p.observed))) for p in pairs):
        return ""
    where = next(filter(None, (_order(pair, between.ranks) for pair in pairs)), "")
    return f"The elements are the right ones in another order{where}: parts of a tensor are put together wrongly."


def _order(pair: Pair, ranks: int) -> str:
    """In which order, where whole slices are exchanged."""
    shape = pair.expected.shape
    wanted, got = (as_bits(value).reshape(shape) for value in (pair.expected, pair.observed))
    if dims := exchanged_dims(wanted, got):
        return f", of {pair.name[1]} with dims {dims[0]} and {dims[1]} exchanged"
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
    sources = [_source(pair, between) for pair in pairs]
    (role, name), source = pairs[0].name, sources[0]
    if source is None or not all(sources):
        return ""
    if source[0] == role:
        return f"The values are those of other tensors: {name} has that of {source[1]}."
    return f"The values are those of other tensors: {role} of {name} has its {source[0]}."


def _source(pair: Pair, between: Between) -> Name | None:
    """Which tensor has the observed value: one of the same role, or of the same parameter."""
    role, name = pair.name
    alike = (key for key, value in between.expected.items() if value == pair.observed and key != pair.name)
    return next((key for key in alike if key[0] == role or (key[1] == name and key[0] in ALIKE_ROLES)), None)


def _scaled(pairs: Sequence[Pair], between: Between) -> str:
    role = next((role for role in CHANGED if any(pair.name[0] == role for pair in pairs)), "")
    changes = [_change(pair) for pair in pairs if pair.name[0] == role]
    whole = _factor(changes)
    if whole is not None and abs(whole - 1) > NEAR:
        where = "in all tensors alike"
        look_at = WHOLE
        if right := sum(name[0] == role for name in between.expected) - len(changes):
            where = f"in {len(changes)} of {len(changes) + right} tensors, and right in the others"
            look_at = "look at what scales the loss or the gradients that reach these tensors alone."
        factor = f"Every change of {role} is {whole:.4g} times what it should be, {where}"
        return f"{factor}: {_of_ranks(whole, between.ranks) or look_at}"
    parts = [[(_rows(a, rank, between.ranks), _rows(b, rank, between.ranks)) for a, b in changes]
             for rank in range(between.ranks)]  # fmt: skip
    each = [_factor(part) for part in parts]
    known = [factor for factor in each if factor is not None]
    if len(known) < between.ranks or between.ranks < 2 or max(known) - min(known) <= NEAR:
        return ""
    told = ", ".join(f"{factor:.4g} times in those of rank {rank}" for rank, factor in enumerate(known))
    return f"Every change of {role} is off by one factor in the rows that a rank has: {told}. {OF_EACH}"


WHOLE = (
    "look at what scales gradients as a whole, such as the norm that they are clipped by, a loss scale, or the number "
    "that their sum is divided by."
)
OF_EACH = "Look at what each rank scales gradients by, such as a norm to which not all ranks have added their share."


def _of_ranks(factor: float, ranks: int) -> str:
    """Where to look if a factor on all changes is the number of ranks, or one divided by that number."""
    if ranks < 2 or min(abs(factor / ranks - 1), abs(factor * ranks - 1)) > NEAR:
        return ""
    often = "as many as there are ranks" if factor > 1 else "one by the number of ranks"
    return f"{often}. Look at what adds up over the ranks and what divides by their number, and how often each is done."


def _still(pairs: Sequence[Pair], between: Between) -> str:
    moved = [[_moves(pair.before, value) for value in (pair.expected, pair.observed)]
             for pair in pairs if pair.name[0] == "param" and pair.before is not None]  # fmt: skip
    if not moved or any(one == other for one, other in moved) or len({one for one, _ in moved}) > 1:
        return ""
    should, every = moved[0][0], sum(name[0] == "param" for name in between.expected)
    if len(moved) < every:
        which = f"{len(moved)} of {every} parameters " + ("should change here, and do not" if should else
                                                          "change here, and should not")  # fmt: skip
    else:
        which = "Parameters " + ("should change here, and none does" if should else "change here, and none should")
    zero = [] if ZERO & rates_in(between.expected) else sorted(ZERO & rates_in(between.observed))
    if should and zero:
        return f"{which}: a learning rate is {zero[0].decode().rpartition(' ')[2]} here."
    return f"{which}: look at what skips a step, at gradients that are zero or do not arrive, and at the rate."


def _moves(before: Value | None, after: Value) -> bool:
    return before is not None and before.data != after.data


def _change(pair: Pair) -> tuple[Floats, Floats]:
    """What should have changed, and what did, each in the tensor's shape."""
    shape = pair.expected.shape or (1,)
    one, other = (as_numbers(value).astype(np.float64).reshape(shape) for value in (pair.expected, pair.observed))
    if pair.before is None or pair.before.shape != pair.expected.shape:
        return one, other
    start = as_numbers(pair.before).astype(np.float64).reshape(shape)
    return one - start, other - start


def _rows(change: Floats, rank: int, ranks: int) -> Floats:
    """The rows that FSDP2 gives a rank: dim 0 in equal parts, of which the last ones are shorter or empty."""
    size = -(-len(change) // ranks)
    return change[rank * size : (rank + 1) * size]


def _factor(changes: Sequence[tuple[Floats, Floats]]) -> float | None:
    """The factor between the expected changes and the observed ones; None where no single number fits them all."""
    wanted, got = (np.concatenate([change[side].reshape(-1) for change in changes]) for side in (0, 1))
    if not (np.isfinite(wanted).all() and np.isfinite(got).all()) or np.count_nonzero(wanted) < DISTINCT:
        return None
    factor = float(wanted @ got / (wanted @ wanted))
    near = np.abs(got - factor * wanted) <= NEAR * np.abs(got).max()
    return factor if factor and near.all() else None


def _same(value: Value, numbers: npt.NDArray[np.generic]) -> bool:
    return value.data == numbers.tobytes()


Rule = Callable[[Sequence[Pair], Between], str]

RULES: tuple[Rule, ...] = (_still, _rearranged, _rounded, _exchanged, _scaled)
"""From specific to general."""
