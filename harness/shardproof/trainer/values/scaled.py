"""Whether every gradient, or every change, is off by one factor: in all tensors, in some, or in each rank's rows.

What a step changes is the gradient's share of it. SGD changes a parameter by a multiple of the gradient. A moment that
decays by a setting of its param group gives the gradient back, whatever it was before: of Adam's `exp_avg`, which
becomes `beta1 * m + (1 - beta1) * g`, the gradient is `(m' - beta1 * m) / (1 - beta1)`. So a gradient that is half of
what it should be shows at any step, though Adam divides its size out of the parameters.

*Verifies*: that one factor fits all elements up to `NEAR` of the largest of their tensor, and that there are enough of
them for chance not to do so. *Does not verify*: what scales.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isclose
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardproof.diff import as_numbers
from shardproof.observe.logical import Value
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.trainer.values.every_mesh import Name, without_rank
from shardproof.trainer.values.gradients import GRADIENT
from shardproof.trainer.values.pairs import Between, Pair
from shardproof.trainer.values.rounding import PARAMS

Floats = npt.NDArray[np.float64]


class Change(NamedTuple):
    """What should have changed, and what did, each in the tensor's shape; and by how much rounding may have made either
    another one, since both are differences of numbers that may be far larger."""

    expected: Floats
    observed: Floats
    rounding: float = 0.0


CHANGED = ("exp_avg", "momentum", "param", EXTRA_STATE)
"""Roles whose changes are a gradient's share, the one that is closest to the gradient first."""

CALLED = {EXTRA_STATE: "the trainer's own tensors"}

NEAR = 2.0**-9
"""How near to one factor a change must be, as a share of the largest one, and how far from 1 the factor."""

EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
"""The distance of 1 and the next number."""

MOST_ROUNDING = 2.0**-3
"""What rounding may have made of a change, as a share of its largest element: with more nobody can tell a factor."""

SIZABLE, ENOUGH = 2.0**-4, 4
"""So many elements of a change must be of this share of the largest one or more: of smaller ones `NEAR` says little."""

_DECAYS = {
    "exp_avg": re.compile(r"(.*\bgroup\d+)\.betas$"),
    "momentum": re.compile(r"(.*\bgroup\d+)\.momentum$"),
}
"""Role of a moment → the setting that says by what it decays in a step; of `betas` the first number."""

_NUMBER = re.compile(r"float ([-+.\de]+)")

NOT_STEPPED = "No optimizer had a gradient of them: look at what else writes them, such as an average of others."

CHANGE_OF_PARAMS = "change of param"

PER_TENSOR = 2
"""With more factors than that among tensors, nobody would see what they have in common."""


def scaled(pairs: Sequence[Pair], between: Between) -> str:
    """A sentence about one factor; empty where none fits."""
    role = next((role for role in CHANGED if any(pair.name[0] == role for pair in pairs)), "")
    if not role:  # such as buffers or second moments alone
        return ""
    by = decays(role, between.settings)
    of_role = [pair for pair in pairs if pair.name[0] == role]
    changes = {
        pair.name[1]: change(pair.expected, pair.observed, pair.before, by.get(pair.name[1], 1.0)) for pair in of_role
    }
    what = f"change of {CALLED.get(role, role)}"
    if changes.keys() <= by.keys():
        what = "gradient that the optimizer was given"
    moved = between.moved(role)  # others are right whatever scales gradients
    every = [name for kind, name in between.expected if kind == role and (name in changes or name in moved)]
    factor = factor_of([*changes.values()])
    if factor is not None and abs(factor - 1) > NEAR:
        beside = any(pair.name[0] == PARAMS for pair in pairs)
        if role == "momentum" and changes.keys() <= by.keys() and not beside:
            return _of_kept(factor, [*changes], between)
        return _of_all(what, factor, [*changes], every, between)
    return _of_ranks_rows(what, [*changes.values()], between) or _of_tensors(what, changes, every, between)


def _of_all(what: str, factor: float, wrong: Sequence[str], every: Sequence[str], between: Between) -> str:
    """The sentence for the same factor in every tensor with wrong values."""
    told, when = f"Every {what} is {factor:.4g} times what it should be", _when(between)
    right = [name for name in every if name not in wrong]
    if right:
        which = f"in {len(wrong)} of {len(every)} tensors{in_common(wrong, right)}, and right in the others{when}"
        if rates := _as_rates(what, wrong, factor, between):
            return f"{told}, {which}, as is the learning rate of their param group: {rates}{_of_groups(between)}"
        if _is_ratio(factor, between.ratio):
            return f"{told}, {which}, {OF_THE_AXIS}"
        if between.gradients and not any(between.gradients.get(name) == GRADIENT for name in wrong):
            return f"{told}, {which}. {NOT_STEPPED}"
        alone = "look at what scales the loss or the gradients that reach these tensors alone."
        return f"{told}, {which}: {OF_THE_UPDATE if _moments_alike(what, wrong, between) else alone}"
    if between.rates and abs(factor / between.rates - 1) < NEAR:
        return f"{told}, in all tensors alike{when}, as are the learning rates: {OF_RATES}"
    if _moments_alike(what, wrong, between):
        return f"{told}, in all tensors alike{when}: {OF_THE_UPDATE}"
    if when:
        return f"{told}, in all tensors alike{when}: {OF_THE_STEP}"
    if _is_ratio(factor, between.ratio):
        return f"{told}, in all tensors alike, {OF_THE_AXIS}"
    by_ranks = _by_ranks(factor, between.ranks)
    if between.known and not by_ranks:
        return f"{told}, in all tensors alike."
    return f"{told}, in all tensors alike: {by_ranks or WHOLE}"


def _of_kept(factor: float, wrong: Sequence[str], between: Between) -> str:
    """The sentence for momenta that take up so many times what they should of a gradient, beside right parameters."""
    rates = {way.get(without_rank(name), (0, 0.0))[1] for name in wrong for way in between.stepped[1:]}
    told = f"What every momentum takes up of its gradient is {factor:.4g} times what it should be{_when(between)}"
    if any(rate and isclose(factor, rate, rel_tol=NEAR) for rate in rates):
        return f"{told}, which is the learning rate, and no parameter differs: {RATE_KEPT}"
    return (
        f"{told}, and no parameter differs: look at what is put into it, and at what it is multiplied by as it is used."
    )


RATE_KEPT = (
    "it keeps updates in the place of gradients, so that they go on at the old rate for some steps when a schedule "
    "sets another one."
)


def _of_ranks_rows(what: str, changes: Sequence[Change], between: Between) -> str:
    """One factor in the rows of each rank."""
    parts = [[Change(_rows(a, rank, between.ranks), _rows(b, rank, between.ranks), least) for a, b, least in changes]
             for rank in range(between.ranks)]  # fmt: skip
    each = [factor_of(part) for part in parts]
    known = [factor for factor in each if factor is not None]
    if len(known) < between.ranks or between.ranks < 2 or max(known) - min(known) <= NEAR:
        return ""
    told = ", ".join(f"{factor:.4g} times in those of rank {rank}" for rank, factor in enumerate(known))
    return f"Every {what} is off by one factor in the rows that a rank has: {told}. {OF_EACH}"


def _of_tensors(what: str, changes: Mapping[str, Change], every: Sequence[str], between: Between) -> str:
    """The sentence for two groups of tensors, each with a factor of its own."""
    groups: list[list[str]] = []
    for name in changes:
        group = next(
            (group for group in groups if factor_of([changes[one] for one in (*group, name)]) is not None), None
        )
        if group is not None:
            group.append(name)
        else:
            groups.append([name])
    factors = [factor_of([changes[name] for name in group]) for group in groups]
    if len(groups) != PER_TENSOR or None in factors or len(changes) < len(every):
        return ""
    (few, one), (most, other) = sorted(zip(groups, factors, strict=True), key=lambda each: len(each[0]))
    which = f"in {len(few)} of {len(every)} tensors{in_common(few, most)}"
    told = f"Every {what} is {one:.4g} times what it should be {which}, and {other:.4g} times in the others"
    rates = [_as_rates(what, names, factor or 0.0, between) for names, factor in ((few, one), (most, other))]
    if all(rates):
        return f"{told}{_when(between)}, as are their learning rates: {' and '.join(rates)}{_of_groups(between)}"
    return (
        f"{told}{_when(between)}: look at what scales the loss or the gradients that reach the one and not the others."
    )


def _as_rates(what: str, names: Sequence[str], factor: float, between: Between) -> str:
    """The learning rates that some parameters were stepped with, where they are apart by the factor by which all of
    their changes are; empty where they are not, or where nobody knows them."""
    pairs = {tuple(way.get(without_rank(name), (0, 0.0))[1] for way in between.stepped) for name in names}
    if what != CHANGE_OF_PARAMS or not all(one and abs(factor - other / one) <= NEAR * factor for one, other in pairs):
        return ""
    return ", ".join(f"{other:.6g} in the place of {one:.6g}" for one, other in sorted(pairs))


def _of_groups(between: Between) -> str:
    """Where to look if rates of param groups are apart in a step; also at what sorts parameters into groups, if they
    are in others."""
    one, other = ({name: group for name, (group, _) in way.items()} for way in between.stepped)
    return (
        f" in this step. Look at what sets the rate of that group, such as a schedule{'' if one == other else SORTED}."
    )


SORTED = ", and at what sorts parameters into groups"


MOST_MODULES = 2
"""Of which all parameters are named together."""


def in_common(names: Sequence[str], others: Sequence[str]) -> str:
    """In brackets, what names have in common and no other has: a last word, or a module; or else the names."""
    last = {name.rpartition(".")[2] for name in names}
    first = {name.partition(".")[0] for name in names}
    if len(last) == 1 and len(names) > 1 and not any(name.rpartition(".")[2] in last for name in others):
        return f" (all that are called {min(last)})"
    whole = not any(name.partition(".")[0] in first for name in others)
    if len(first) <= MOST_MODULES and len(names) > len(first) and whole:
        return f" (all of {' and '.join(sorted(first))})"
    return f" ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


def _when(between: Between) -> str:
    """The step, where the steps before it show no difference."""
    return f", at step {between.step} and at none before it" if between.step >= 0 and between.earlier else ""


OF_THE_UPDATE = (
    "their moments are right, and so are their gradients: look at what the optimizer makes of them, such as the "
    "learning rate, a bias correction, or a term of the update."
)


def _moments_alike(what: str, wrong: Sequence[str], between: Between) -> bool:
    """Whether a parameter of which the update is wrong has moments, and all such have the right ones."""
    moments = [(role, name) for role in ("exp_avg", "momentum") for name in wrong if (role, name) in between.expected]
    alike = all(between.observed.get(key) == between.expected[key] for key in moments)
    return what.startswith("change of param") and bool(moments) and alike


WHOLE = (
    "look at what scales gradients as a whole, such as the norm that they are clipped by, a loss scale, or the number "
    "that their sum is divided by."
)
OF_THE_STEP = (
    "look at the number that a sum of gradients is divided by, and at what this step has and those before it have not, "
    "such as fewer micro-batches at the end of an epoch; or at a norm that they are clipped by in this step alone."
)
OF_THE_AXIS = (
    "which is the ratio of the axis' two values. Look at the number that the sum of gradients, or the loss, is divided "
    "by, and at whether that is done before the backward."
)
OF_RATES = "look at what sets the rate of a param group, such as a schedule when it is built or stepped."
OF_EACH = "Look at what each rank scales gradients by, such as a norm to which not all ranks have added their share."


def _is_ratio(factor: float, ratio: float) -> bool:
    """Whether a factor is the ratio of an axis' two values, or one by it."""
    return ratio > 0 and min(abs(factor / ratio - 1), abs(factor * ratio - 1)) <= NEAR


def _by_ranks(factor: float, ranks: int) -> str:
    """Where to look if a factor on all changes is the number of ranks, or one divided by that number."""
    if ranks < 2 or min(abs(factor / ranks - 1), abs(factor * ranks - 1)) > NEAR:
        return ""
    often = "as many as there are ranks" if factor > 1 else "one by the number of ranks"
    return f"{often}. Look at what adds up over the ranks and what divides by their number, and how often each is done."


def decays(role: str, settings: Mapping[Name, Value]) -> dict[str, float]:
    """Parameter → by what its moment decays in a step, of those whose param group says so."""
    found: dict[str, float] = {}
    for (kind, name), value in settings.items():
        group = _DECAYS[role].fullmatch(name) if role in _DECAYS and kind == "setting" else None
        number = _NUMBER.search(value.data.decode()) if group else None
        if group and number:
            names = settings.get((kind, f"{group[1]}.params"))
            found |= dict.fromkeys(names.data.decode().split("\n") if names else (), float(number[1]))
    return found


def change(expected: Value, observed: Value, before: Value | None, decay: float) -> Change:
    """What should have changed, and what did, beside what a step keeps of the value before it."""
    shape = expected.shape or (1,)
    one, other = (as_numbers(value).astype(np.float64).reshape(shape) for value in (expected, observed))
    if before is None or before.shape != expected.shape:
        return Change(one, other)
    start = decay * as_numbers(before).astype(np.float64).reshape(shape)
    largest = max(float(np.abs(each).max(initial=0)) for each in (one, start))
    return Change(one - start, other - start, EPSILON.get(expected.dtype, 0.0) * largest)


def _rows(values: Floats, rank: int, ranks: int) -> Floats:
    """The rows that FSDP2 gives a rank: dim 0 in equal parts, of which the last ones are shorter or empty."""
    size = -(-len(values) // ranks)
    return values[rank * size : (rank + 1) * size]


def factor_of(changes: Sequence[Change]) -> float | None:
    """The factor between the expected changes and the observed ones; None where no single number fits them all."""
    wanted = np.concatenate([each.expected.reshape(-1) for each in changes])
    got = np.concatenate([each.observed.reshape(-1) for each in changes])
    if not (np.isfinite(wanted).all() and np.isfinite(got).all()) or not wanted.any():
        return None
    factor = float(wanted @ got / (wanted @ wanted))
    sizable = sum(np.count_nonzero(np.abs(one) >= SIZABLE * np.abs(one).max()) for one, _, _ in changes if one.any())
    if not factor or sizable < ENOUGH:
        return None
    for one, other, least in changes:
        size, slack = np.abs(other).max(initial=0), least * (1 + abs(factor))
        if slack > MOST_ROUNDING * size or (np.abs(other - factor * one) > NEAR * size + slack).any():
            return None
    return factor
