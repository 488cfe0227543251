"""Which combinations of axis values some complete scenario contains: exact, by variable elimination.

The constraints of a space are truth tables over a few axes each. Joining the tables that mention an axis and
projecting the axis away leaves a table over its neighbours that says for which of their values the axis still
has one. Eliminating every axis but a few therefore gives exactly their feasible combinations (Dechter, *Bucket
elimination*, Artificial Intelligence 113, 1999), without enumerating scenarios.

*Verifies*: that a combination of values occurs in at least one scenario that all tables allow.
*Does not verify*: the tables themselves; they come from `constraints.tabulate`. Knows no axis by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Axes = tuple[int, ...]
Bools = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Factor:
    """A table over axes given by position, ascending; `allowed` has one dim for each of them."""

    axes: Axes
    allowed: Bools


def factor(axes: Sequence[int], allowed: Bools) -> Factor:
    """A factor with its axes put in ascending order."""
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return Factor(tuple(axes[i] for i in order), allowed.transpose(order))


def join(first: Factor, second: Factor) -> Factor:
    """Both tables at once, over the union of their axes."""
    if first.axes == second.axes:
        return Factor(first.axes, first.allowed & second.allowed)
    axes = tuple(sorted({*first.axes, *second.axes}))
    return Factor(axes, _spread(first, axes) & _spread(second, axes))


def project(sizes: Sequence[int], factors: Iterable[Factor], keep: Axes) -> Bools:
    """The feasible combinations of the axes `keep` (ascending): a table with one dim for each of them."""
    left = _merged(factors)
    gone = [axis for axis in range(len(sizes)) if axis not in keep]
    while gone:
        axis = min(gone, key=lambda a: _joined_size(left, a, sizes))
        gone.remove(axis)
        left = _eliminate(left, axis)
    return _closed(left, keep, sizes)


def projections(
    sizes: Sequence[int], factors: Iterable[Factor], subsets: Iterable[Axes]
) -> Iterator[tuple[Axes, Bools]]:
    """`project` for many subsets of axes, sharing the eliminations that they have in common."""
    wanted = {tuple(sorted(subset)) for subset in subsets}
    order = _elimination_order(sizes, factors)
    yield from _walk(sizes, _merged(factors), order, wanted)


def count(sizes: Sequence[int], factors: Iterable[Factor]) -> int:
    """How many complete combinations all tables allow. Exact below 2^53."""
    left: list[tuple[Axes, npt.NDArray[np.float64]]] = [
        (f.axes, f.allowed.astype(np.float64)) for f in _merged(factors).values()
    ]
    total = 1.0
    remaining = set(range(len(sizes)))
    while remaining:
        axis = min(remaining, key=lambda a: len({x for axes, _ in left if a in axes for x in axes}))
        remaining.remove(axis)
        touching = [f for f in left if axis in f[0]]
        left = [f for f in left if axis not in f[0]]
        if not touching:
            total *= sizes[axis]
            continue
        axes = tuple(sorted({x for f in touching for x in f[0]}))
        table = reduce(np.multiply, (_expand(f[1], f[0], axes) for f in touching)).sum(axis=axes.index(axis))
        rest = tuple(x for x in axes if x != axis)
        if rest:
            left.append((rest, table))
        else:
            total *= float(table)
    return int(total)


def buckets(sizes: Sequence[int], factors: Iterable[Factor], keep: Axes) -> list[tuple[int, list[Factor]]]:
    """In which order to assign the axes outside `keep`, and under which tables, so that none ever runs out of values.

    Each entry is an axis with the tables that bind it to `keep` and to the axes of the entries before it. From
    any feasible assignment of `keep`, every value that an entry's tables allow leads to a complete assignment.
    """
    left = _merged(factors)
    gone = [axis for axis in range(len(sizes)) if axis not in keep]
    found: list[tuple[int, list[Factor]]] = []
    while gone:
        axis = min(gone, key=lambda a: _joined_size(left, a, sizes))
        gone.remove(axis)
        found.append((axis, [f for f in left.values() if axis in f.axes]))
        left = _eliminate(left, axis)
    return found[::-1]


def _walk(
    sizes: Sequence[int], factors: dict[Axes, Factor], order: Axes, wanted: set[Axes]
) -> Iterator[tuple[Axes, Bools]]:
    """Depth first along `order`: each axis is either kept or eliminated; subsets sharing a prefix share its work."""
    if not wanted:
        return
    if not order:
        (subset,) = wanted
        yield subset, _closed(factors, subset, sizes)
        return
    axis, rest = order[0], order[1:]
    yield from _walk(sizes, factors, rest, {subset for subset in wanted if axis in subset})
    without = {subset for subset in wanted if axis not in subset}
    if without:
        yield from _walk(sizes, _eliminate(factors, axis), rest, without)


def _eliminate(factors: dict[Axes, Factor], axis: int) -> dict[Axes, Factor]:
    touching = [f for f in factors.values() if axis in f.axes]
    if not touching:
        return factors
    joined = reduce(join, sorted(touching, key=lambda f: f.allowed.size))
    allowed: Bools = np.asarray(joined.allowed.any(axis=joined.axes.index(axis)))
    left = Factor(tuple(a for a in joined.axes if a != axis), allowed)
    others = [f for f in factors.values() if axis not in f.axes]
    return _merged(others if left.allowed.all() else [*others, left])


def _merged(factors: Iterable[Factor]) -> dict[Axes, Factor]:
    merged: dict[Axes, Factor] = {}
    for each in factors:
        merged[each.axes] = join(merged[each.axes], each) if each.axes in merged else each
    return merged


def _closed(factors: dict[Axes, Factor], keep: Axes, sizes: Sequence[int]) -> Bools:
    result = np.ones([sizes[a] for a in keep], np.bool_)
    for each in factors.values():
        result &= _spread(each, keep)
    return result


def _elimination_order(sizes: Sequence[int], factors: Iterable[Factor]) -> Axes:
    """Greedy: next the axis whose elimination builds the smallest table."""
    scopes = [set(f.axes) for f in factors]
    remaining, order = set(range(len(sizes))), []
    while remaining:

        def built(axis: int, scopes: list[set[int]] = scopes) -> tuple[int, int]:
            scope = set().union(*(s for s in scopes if axis in s))
            return prod(sizes[a] for a in scope), axis

        axis = min(remaining, key=built)
        scope = set().union(*(s for s in scopes if axis in s)) - {axis}
        scopes = [*(s for s in scopes if axis not in s), scope]
        remaining.remove(axis)
        order.append(axis)
    return tuple(order)


def _joined_size(factors: dict[Axes, Factor], axis: int, sizes: Sequence[int]) -> int:
    scope = {a for f in factors.values() if axis in f.axes for a in f.axes}
    return prod(sizes[a] for a in scope)


def _spread(each: Factor, axes: Axes) -> Bools:
    return _expand(each.allowed, each.axes, axes)


def _expand(table: npt.NDArray[Scalar], has: Axes, axes: Axes) -> npt.NDArray[Scalar]:
    """`table` over the axes `has`, with a dim of 1 for every other one of `axes`."""
    sizes = dict(zip(has, table.shape, strict=True))
    return table.reshape([sizes.get(a, 1) for a in axes])
