"""Covering arrays: few complete rows that contain every feasible combination of each demanded set of axes.

A batched greedy generator. Rows that start from the same axes (the cells of the exhaustive walk, then still
uncovered combinations of one demanded set of axes) are completed together, one axis after the other, each row
taking the value that covers most. Axes are assigned in reverse order of an elimination that keeps the starting
axes, under the tables which that elimination built: so a row never runs into a dead end (Dechter, *Bucket
elimination*, 1999), and every feasible combination is reached.

*Verifies* nothing: `coverage` counts what the rows cover, from the scenarios alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from harness.space.feasible import Axes, Bools, Feasible

Rows = npt.NDArray[np.int64]
Scalar = TypeVar("Scalar", bound=np.generic)
_ByOthers = tuple[Axes, npt.NDArray[Scalar]]

COVERED = 0
LARGEST_BATCH = 128
BATCH_SHARE = 16


class Cover:
    """Rows under construction, and which combinations are still open.

    feasible: what the constraints leave. demands: the sets of axes (ascending) whose feasible combinations must all
    appear. needless: combinations that need not, after all. cost: for some axes, a
    number for each value; among values that cover equally much the cheapest wins.
    """

    def __init__(
        self,
        feasible: Feasible,
        demands: Iterable[Axes],
        seed: int = 0,
        cost: Mapping[int, npt.NDArray[np.float64]] | None = None,
        needless: Mapping[Axes, Bools] | None = None,
    ) -> None:
        self._feasible = feasible
        self._sizes = feasible.sizes
        self._random = np.random.default_rng(seed)
        self._cost = dict(cost or {})
        self._open = {
            axes: (table & ~needless[axes] if needless else table).astype(np.int8)
            for axes, table in feasible.projections(demands)
        }
        self._by_axis: list[list[_ByOthers[np.int8]]] = [
            [_by_others(axes, table, axis) for axes, table in self._open.items() if axis in axes]
            for axis in range(len(self._sizes))
        ]
        self._routes: dict[Axes, list[tuple[int, list[_ByOthers[np.bool_]]]]] = {}
        self._rows: list[Rows] = []

    @property
    def rows(self) -> Rows:
        """All rows so far, shape (rows, axes): the index of each axis's value."""
        return np.concatenate([np.empty((0, len(self._sizes)), np.int64), *self._rows])

    def start_from(self, axes: Axes, cells: Rows) -> None:
        """Complete every cell, an assignment of `axes` (shape (n, len(axes)), each feasible), to a row."""
        shuffled = self._random.permutation(cells)
        size = min(LARGEST_BATCH, len(cells) // BATCH_SHARE + 1)
        for start in range(0, len(cells), size):
            self._add(axes, shuffled[start : start + size])

    def fill(self) -> None:
        """Add rows until no demanded combination is open."""
        while True:
            left = {axes: int(np.count_nonzero(table)) for axes, table in self._open.items()}
            axes = max(left, key=left.__getitem__, default=())
            if not left.get(axes):
                return
            cells = np.argwhere(self._open[axes])
            size = min(LARGEST_BATCH, len(cells) // BATCH_SHARE + 1)
            self._add(axes, self._random.permutation(cells)[:size])

    def _add(self, axes: Axes, cells: Rows) -> None:
        columns = self._complete(axes, cells)
        for demand, table in self._open.items():
            table[tuple(columns[axis] for axis in demand)] = COVERED
        self._rows.append(np.stack([columns[axis] for axis in range(len(self._sizes))], axis=1))

    def _complete(self, axes: Axes, cells: Rows) -> dict[int, Rows]:
        """Axis → the value of every row, shape (rows,), for rows that start with `cells` on `axes`."""
        columns = {axis: np.ascontiguousarray(cells[:, place]) for place, axis in enumerate(axes)}
        for axis, refused in self._route(axes):
            score = self._random.random((len(cells), self._sizes[axis]), np.float32)
            if axis in self._cost:
                score = score * 0.01 - self._cost[axis].astype(np.float32)
            for others, opened in self._by_axis[axis]:
                if all(other in columns for other in others):
                    score += opened[tuple(columns[other] for other in others)]
            for others, table in refused:
                found = table[tuple(self._feasible.classes[other][columns[other]] for other in others)]
                score[..., found[..., self._feasible.classes[axis]]] = -np.inf
            columns[axis] = score.argmax(axis=1)
        return columns

    def _route(self, axes: Axes) -> list[tuple[int, list[_ByOthers[np.bool_]]]]:
        """`Feasible.buckets`, turned round: for each axis the classes refused, by the classes of other axes."""
        if axes not in self._routes:
            self._routes[axes] = [
                (axis, [_by_others(each.axes, ~each.allowed, axis) for each in tables])
                for axis, tables in self._feasible.buckets(axes)
            ]
        return self._routes[axes]


def _by_others(axes: Axes, table: npt.NDArray[Scalar], axis: int) -> _ByOthers[Scalar]:
    """The axes but `axis`, and a view of `table` with the dim of `axis` last."""
    place = axes.index(axis)
    return (*axes[:place], *axes[place + 1 :]), np.moveaxis(table, place, -1)
