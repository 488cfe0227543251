"""Covering arrays: few complete rows that contain every feasible combination of each demanded set of axes.

A batched greedy generator. Rows that start from the same axes (the cells of the exhaustive walk, then still
uncovered combinations of one demanded set of axes) are completed together, one axis after the other, each row
taking the value that covers most. Axes are assigned in reverse order of an elimination that keeps the starting
axes, under the tables which that elimination built: so a row never runs into a dead end (Dechter, *Bucket
elimination*, 1999), and every feasible combination is reached.

*Verifies* nothing: `coverage` counts what the rows cover, from the scenarios alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from harness.feasible import Axes, Bools, Factor, buckets, projections

Rows = npt.NDArray[np.int64]

COVERED = 0
LARGEST_BATCH = 128
BATCH_SHARE = 16


class Cover:
    """Rows under construction, and which combinations are still open.

    sizes: number of values of each axis. factors: the constraints. demands: the sets of axes (ascending) whose
    feasible combinations must all appear. needless: combinations that need not, after all. cost: for some axes, a
    number for each value; among values that cover equally much the cheapest wins.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Sequence[Factor],
        demands: Iterable[Axes],
        seed: int = 0,
        cost: Mapping[int, npt.NDArray[np.float64]] | None = None,
        needless: Mapping[Axes, Bools] | None = None,
    ) -> None:
        self._sizes = tuple(sizes)
        self._factors = tuple(factors)
        self._random = np.random.default_rng(seed)
        self._cost = dict(cost or {})
        self._open = {
            axes: (table & ~needless[axes] if needless else table).astype(np.int8)
            for axes, table in projections(sizes, factors, demands)
        }
        self._by_axis: dict[int, list[tuple[Axes, npt.NDArray[np.int8]]]] = {axis: [] for axis in range(len(sizes))}
        for axes, table in self._open.items():
            for place, axis in enumerate(axes):
                others = (*axes[:place], *axes[place + 1 :])
                self._by_axis[axis].append((others, np.moveaxis(table, place, -1)))
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
        rows = self._complete(axes, cells)
        for demand, table in self._open.items():
            table[tuple(rows[:, axis] for axis in demand)] = COVERED
        self._rows.append(rows)

    def _complete(self, axes: Axes, cells: Rows) -> Rows:
        rows = np.full((len(cells), len(self._sizes)), -1, np.int64)
        rows[:, axes] = cells
        assigned = set(axes)
        for axis, tables in buckets(self._sizes, self._factors, axes):
            score = self._random.random((len(cells), self._sizes[axis]), np.float32)
            if axis in self._cost:
                score = score * 0.01 - self._cost[axis].astype(np.float32)
            for others, opened in self._by_axis[axis]:
                if assigned.issuperset(others):
                    score += opened[tuple(rows[:, other] for other in others)]
            for each in tables:
                allowed = np.moveaxis(each.allowed, each.axes.index(axis), -1)
                score[..., ~allowed[tuple(rows[:, other] for other in each.axes if other != axis)]] = -np.inf
            rows[:, axis] = score.argmax(axis=1)
            assigned.add(axis)
        return rows
