"""Determines exactly, by variable elimination, which combinations of axis values occur in a complete scenario.

The constraints of a space are truth tables over a few axes each. Joining the tables that mention an axis and
projecting the axis away leaves a table over its neighbours that says for which of their values the axis still
has one. Eliminating every axis but a few therefore gives exactly their feasible combinations (Dechter, *Bucket
elimination*, Artificial Intelligence 113, 1999), without enumerating scenarios.

Two things keep this cheap. Values that no table tells apart are one *class*, and all of this is done on classes: of
eighteen optimizers, the tables of the reference tell five kinds apart. And a space remembers what it has joined and
eliminated, since the projections that a plan asks for differ in a few axes only.

*Verifies*: that a combination of values occurs in at least one scenario that all tables allow.
*Does not verify*: the tables themselves; they come from `constraints.tabulate`. Knows no axis by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Axes = tuple[int, ...]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)

PACKED_FROM = 1_000_000
"""Entries of joined tables from which on it is worth packing them."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A table over axes given by position, ascending; `allowed` has one dim for each of them."""

    axes: Axes
    allowed: Bools


def factor(axes: Sequence[int], allowed: Bools) -> Factor:
    """A factor with its axes put in ascending order."""
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return Factor(tuple(axes[i] for i in order), allowed.transpose(order))


class Feasible:
    """The combinations that tables leave, of axes that have `sizes` values each.

    classes: for each axis the class of every value. Tables of the methods are over values, but for `buckets`.
    """

    def __init__(self, sizes: Sequence[int], factors: Iterable[Factor]) -> None:
        self.sizes = tuple(sizes)
        merged = _merged(factors)
        self.classes = [_classes(size, axis, merged.values()) for axis, size in enumerate(sizes)]
        firsts = [np.unique(classes, return_index=True)[1] for classes in self.classes]
        self._weights = [np.bincount(classes).astype(np.float64) for classes in self.classes]
        self._factors = {
            axes: Factor(axes, each.allowed[crossed([firsts[axis] for axis in axes])]) for axes, each in merged.items()
        }
        self._order = self._elimination_order()
        self._bits = {axis: 1 << bit for bit, axis in enumerate(reversed(self._order))}
        self._joined: dict[tuple[Factor, ...], Factor] = {}
        self._eliminated: dict[tuple[int, tuple[Factor, ...]], Factor | None] = {}
        self._projected: dict[Axes, Bools] = {}

    def project(self, keep: Axes) -> Bools:
        """The feasible combinations of the axes `keep` (ascending): a table with one dim for each of them."""
        ((_, table),) = self.projections([keep])
        return table

    def projections(self, subsets: Iterable[Axes]) -> Iterator[tuple[Axes, Bools]]:
        """`project` for many subsets of axes, sharing the eliminations that they have in common."""
        wanted = set(map(tuple, map(sorted, subsets)))
        place = {axis: position for position, axis in enumerate(self._order)}
        new = [(tuple(sorted(map(place.__getitem__, each))), each) for each in wanted - self._projected.keys()]
        if new:
            self._walk(self._factors, 0, new)
        for subset in sorted(wanted, key=self._rank, reverse=True):
            yield subset, self._spread(subset, self._projected[subset])

    def _rank(self, subset: Axes) -> int:
        """The greater, the earlier `_walk` comes to a subset: with a bit for each axis, the first one's the highest."""
        return sum(map(self._bits.__getitem__, subset))

    def count(self) -> int:
        """How many complete combinations all tables allow. Exact below 2^53."""
        left: list[tuple[Axes, npt.NDArray[np.float64]]] = [
            (each.axes, each.allowed.astype(np.float64)) for each in self._factors.values()
        ]
        left += [((axis,), weights) for axis, weights in enumerate(self._weights)]
        total = float(all(each.allowed for each in self._factors.values() if not each.axes))
        beside: dict[int, set[int]] = {axis: {axis} for axis in range(len(self.sizes))}  # itself among them
        for each in self._factors:
            for axis in each:
                beside[axis].update(each)
        while beside:
            axis = min(beside, key=lambda a: len(beside[a]))
            axes = tuple(sorted(beside.pop(axis)))
            touching = [f for f in left if axis in f[0]]
            left = [f for f in left if axis not in f[0]]
            for other in axes:
                if other != axis:
                    beside[other].update(axes)
                    beside[other].remove(axis)
            table = reduce(np.multiply, (_expand(f[1], f[0], axes) for f in touching)).sum(axis=axes.index(axis))
            rest = tuple(x for x in axes if x != axis)
            if rest:
                left.append((rest, table))
            else:
                total *= float(table)
        return int(total)

    def buckets(self, keep: Axes) -> list[tuple[int, list[Factor]]]:
        """In which order to assign the axes outside `keep`, and under which tables, so that none ever runs out of
        values.

        Each entry is an axis with the tables, over classes, that bind it to `keep` and to the axes of the entries
        before it. From any feasible assignment of `keep`, every value that an entry's tables allow leads to a complete
        assignment.
        """
        left = self._factors
        gone = [axis for axis in range(len(self.sizes)) if axis not in keep]
        found: list[tuple[int, list[Factor]]] = []
        while gone:
            axis = min(gone, key=lambda a: _joined_size(left, a, self.sizes))
            gone.remove(axis)
            found.append((axis, [f for f in left.values() if axis in f.axes]))
            left = self._eliminate(left, axis)
        return found[::-1]

    def _walk(self, factors: dict[Axes, Factor], position: int, wanted: Iterable[tuple[Axes, Axes]]) -> None:
        """Depth first along the order of elimination: each axis is kept or eliminated; subsets sharing a prefix share
        its work.

        Args:
            position: of the next axis in that order. wanted: subsets, each with the positions, ascending, of those of
                its axes that are still to come.
        """
        by_next: dict[int, list[tuple[Axes, Axes]]] = {}
        for positions, subset in wanted:
            by_next.setdefault(positions[0] if positions else len(self._order), []).append((positions[1:], subset))
        for each in range(position, len(self._order)):
            kept = by_next.pop(each, None)
            if kept:
                self._walk(factors, each + 1, kept)
            if not by_next:
                return
            factors = self._eliminate(factors, self._order[each])
        for _, subset in by_next[len(self._order)]:
            self._projected[subset] = self._closed(factors, subset)

    def _eliminate(self, factors: dict[Axes, Factor], axis: int) -> dict[Axes, Factor]:
        touching: list[Factor] = []
        others: dict[Axes, Factor] = {}
        for axes, each in factors.items():
            if axis in axes:
                touching.append(each)
            else:
                others[axes] = each
        if not touching:
            return factors
        key = axis, tuple(touching)
        if key not in self._eliminated:
            self._eliminated[key] = _eliminated(axis, touching)
        left = self._eliminated[key]
        if left is not None:
            others[left.axes] = self._join(others[left.axes], left) if left.axes in others else left
        return others

    def _join(self, first: Factor, second: Factor) -> Factor:
        if (first, second) not in self._joined:
            self._joined[first, second] = join(first, second)
        return self._joined[first, second]

    def _closed(self, factors: dict[Axes, Factor], keep: Axes) -> Bools:
        result = np.ones([len(self._weights[axis]) for axis in keep], np.bool_)
        for each in factors.values():
            result &= _expand(each.allowed, each.axes, keep)
        return result

    def _spread(self, axes: Axes, table: Bools) -> Bools:
        """A table over classes as one over values."""
        for dim, axis in enumerate(axes):
            table = table.take(self.classes[axis], axis=dim)
        return table

    def _elimination_order(self) -> Axes:
        """Greedy: next the axis whose elimination builds the smallest table."""
        scopes = [set(axes) for axes in self._factors]
        remaining, order = set(range(len(self.sizes))), []
        while remaining:

            def built(axis: int, scopes: list[set[int]] = scopes) -> tuple[int, int]:
                scope = set().union(*[s for s in scopes if axis in s])
                return prod(map(self.sizes.__getitem__, scope)), axis

            axis = min(remaining, key=built)
            scope = set().union(*(s for s in scopes if axis in s)) - {axis}
            scopes = [*(s for s in scopes if axis not in s), scope]
            remaining.remove(axis)
            order.append(axis)
        return tuple(order)


def crossed(indices: Sequence[Ints]) -> tuple[Ints, ...]:
    """An index of every combination of some indices of each dim, as `np.ix_` makes it; that one takes longer than what
    is done with it."""
    last = len(indices) - 1
    return tuple(index.reshape(-1, *[1] * (last - dim)) for dim, index in enumerate(indices))


def join(first: Factor, second: Factor) -> Factor:
    """Both tables at once, over the union of their axes."""
    if first.axes == second.axes:
        return Factor(first.axes, first.allowed & second.allowed)
    axes = tuple(sorted({*first.axes, *second.axes}))
    return Factor(axes, _expand(first.allowed, first.axes, axes) & _expand(second.allowed, second.axes, axes))


def _classes(size: int, axis: int, factors: Iterable[Factor]) -> Ints:
    """The class of each value of an axis: values whose slices are equal in all tables share one."""
    slices = [
        np.moveaxis(each.allowed, each.axes.index(axis), 0).reshape(size, -1) for each in factors if axis in each.axes
    ]
    known: dict[tuple[bytes, ...], int] = {}
    return np.array([known.setdefault(tuple(s[i].tobytes() for s in slices), len(known)) for i in range(size)])


def _eliminated(axis: int, touching: Sequence[Factor]) -> Factor | None:
    """Eliminate one variable: join the tables that mention the axis and project the axis out. None if the projection
    allows every combination.

    Where the tables joined have many entries, millions at times, the axis's values lie in the bits of bytes meanwhile.
    """
    sizes = {a: size for f in touching for a, size in zip(f.axes, f.allowed.shape, strict=True)}
    if prod(sizes.values()) > PACKED_FROM:
        touching = [_packed(each, axis) for each in touching]
    joined = reduce(join, sorted(touching, key=lambda f: f.allowed.size))
    allowed: Bools = np.asarray(joined.allowed.any(axis=joined.axes.index(axis)))
    return None if allowed.all() else Factor(tuple(a for a in joined.axes if a != axis), allowed)


def _packed(table: Factor, axis: int) -> Factor:
    """A table with the values of an axis in the bits of bytes, eight in one."""
    packed: Any = np.packbits(table.allowed, axis=table.axes.index(axis))
    return Factor(table.axes, packed)


def _merged(factors: Iterable[Factor]) -> dict[Axes, Factor]:
    merged: dict[Axes, Factor] = {}
    for each in factors:
        merged[each.axes] = join(merged[each.axes], each) if each.axes in merged else each
    return merged


def _joined_size(factors: dict[Axes, Factor], axis: int, sizes: Sequence[int]) -> int:
    scope = set().union(*[axes for axes in factors if axis in axes])
    return prod(map(sizes.__getitem__, scope))


def _expand(table: npt.NDArray[Scalar], has: Axes, axes: Axes) -> npt.NDArray[Scalar]:
    """`table` over the axes `has`, with a dim of 1 for every other one of `axes`."""
    sizes = dict(zip(has, table.shape, strict=True))
    return table.reshape([sizes.get(a, 1) for a in axes])
