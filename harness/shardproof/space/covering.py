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
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import numpy.typing as npt

from shardproof.space.feasible import Axes, Bools, Factor, Feasible, Ints

Rows = npt.NDArray[np.int64]
Columns = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

COVERED = 0
LARGEST_BATCH = 128
BATCH_SHARE = 16


@dataclass(frozen=True)
class _Places:
    """Where combinations lie in one array that holds the table of each demand after that of the one before.

    offsets: of each demand. axes, strides, shape (most axes of a demand, demands): each demand's axes, and how far
    apart two values of them lie; filled up with strides of 0.
    """

    offsets: Ints
    axes: Ints
    strides: Ints

    @classmethod
    def from_demands(cls, demands: Sequence[Axes], sizes: Sequence[int]) -> _Places:
        most = max(map(len, demands), default=0)
        axes, strides = np.zeros((2, most, len(demands)), np.int64)
        for number, demand in enumerate(demands):
            for place, axis in enumerate(demand):
                axes[place, number] = axis
                strides[place, number] = prod(sizes[after] for after in demand[place + 1 :])
        lengths = [prod(sizes[axis] for axis in demand) for demand in demands]
        return cls(np.array([0, *accumulate(lengths)], np.int64)[: len(demands)], axes, strides)

    def some(self, numbers: Sequence[int]) -> _Places:
        """The places of some of the demands."""
        return _Places(self.offsets[list(numbers)], self.axes[:, list(numbers)], self.strides[:, list(numbers)])

    def find(self, columns: Columns) -> Ints:
        """The place of each row's combination in each demand, shape (demands, rows)."""
        found = np.zeros((len(self.offsets), columns.shape[1]), np.int64)
        found += self.offsets[:, np.newaxis]
        for axes, strides in zip(self.axes, self.strides, strict=True):
            found += columns[axes] * strides[:, np.newaxis]
        return found


@dataclass(frozen=True)
class _Side:
    """What is open of the demands that have one axis, with its values side by side.

    demands: which. places: of the values of the other axes. open, shape (places, values of the axis).
    """

    demands: Sequence[int]
    places: _Places
    open: npt.NDArray[np.int8]

    @classmethod
    def from_tables(cls, axis: int, tables: Mapping[Axes, npt.NDArray[np.int8]], sizes: Sequence[int]) -> _Side:
        numbers = [number for number, axes in enumerate(tables) if axis in axes]
        demands = [axes for axes in tables if axis in axes]
        others = [tuple(other for other in axes if other != axis) for axes in demands]
        turned = [np.moveaxis(tables[axes], axes.index(axis), -1).reshape(-1, sizes[axis]) for axes in demands]
        return cls(
            numbers, _Places.from_demands(others, sizes), np.concatenate([np.empty((0, sizes[axis]), np.int8), *turned])
        )


@dataclass(frozen=True)
class _Step:
    """How one axis is assigned, after those of the steps before it.

    refused: tables of what it must not be: other axes, and a table over their classes and the axis's values.
    complete: places of the demands that are complete with it, in the axis's `_Side`.
    """

    axis: int
    refused: Sequence[tuple[Axes, Bools]]
    complete: _Places


class Cover:
    """Rows under construction, and which combinations are still open.

    Most of the time goes into counting, for every row of a batch and every value of the next axis, the open
    combinations that the value would cover. So what is open is held once for each axis, with the axis's values side by
    side (`_Side`), beside once for all (`_open`, in the order of the demands).

    feasible: what the constraints leave. demands: the sets of axes (ascending) whose feasible combinations must all
    appear. needless: combinations that need not, after all. cost: for some axes, a number for each value; among values
    that cover equally much the cheapest wins.
    """

    def __init__(
        self,
        feasible: Feasible,
        demands: Iterable[Axes],
        seed: int = 0,
        cost: Mapping[int, Floats] | None = None,
        needless: Mapping[Axes, Bools] | None = None,
    ) -> None:
        self._feasible = feasible
        self._sizes = feasible.sizes
        self._random = np.random.default_rng(seed)
        self._cost = dict(cost or {})
        tables = {
            axes: (table & ~needless[axes] if needless else table).astype(np.int8)
            for axes, table in feasible.projections(demands)
        }
        self._demands = list(tables)
        self._places = _Places.from_demands(self._demands, self._sizes)
        self._open = np.concatenate([np.empty(0, np.int8), *(table.ravel() for table in tables.values())])
        self._sides = [_Side.from_tables(axis, tables, self._sizes) for axis in range(len(self._sizes))]
        self._routes: dict[Axes, list[_Step]] = {}
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
        while self._demands:
            left = np.add.reduceat(self._open, self._places.offsets, dtype=np.int64)
            most = int(left.argmax())
            if not left[most]:
                return
            axes, offset = self._demands[most], int(self._places.offsets[most])
            shape = [self._sizes[axis] for axis in axes]
            cells = np.argwhere(self._open[offset : offset + prod(shape)].reshape(shape))
            size = min(LARGEST_BATCH, len(cells) // BATCH_SHARE + 1)
            self._add(axes, self._random.permutation(cells)[:size])

    def _add(self, axes: Axes, cells: Rows) -> None:
        columns = self._complete(axes, cells)
        self._open[self._places.find(columns)] = COVERED
        for side, column in zip(self._sides, columns, strict=True):
            side.open[side.places.find(columns), column] = COVERED
        self._rows.append(columns.T)

    def _complete(self, axes: Axes, cells: Rows) -> Columns:
        """The rows that start with `cells` on `axes`."""
        columns = np.zeros((len(self._sizes), len(cells)), np.int64)
        columns[list(axes)] = cells.T
        for step in self._route(axes):
            axis = step.axis
            found = step.complete.find(columns)
            scores = np.empty((1 + len(found), len(cells), self._sizes[axis]), np.float32)
            scores[0] = self._random.random((len(cells), self._sizes[axis]), np.float32)
            if axis in self._cost:
                scores[0] = scores[0] * 0.01 - self._cost[axis].astype(np.float32)
            scores[1:] = self._sides[axis].open[found]
            score = scores.sum(axis=0)
            score[self._refused(step, columns)] = -np.inf
            columns[axis] = score.argmax(axis=1)
        return columns

    def _refused(self, step: _Step, columns: Columns) -> Bools:
        """Which values of the step's axis are not allowed after the values that a row has, shape (rows, values)."""
        classes = self._feasible.classes
        refused: Bools = np.zeros((columns.shape[1], self._sizes[step.axis]), np.bool_)
        for others, table in step.refused:
            refused |= table[tuple(classes[other][columns[other]] for other in others)]
        return refused

    def _route(self, axes: Axes) -> list[_Step]:
        """The steps that follow on `axes`: `Feasible.buckets`, with the demands that each completes."""
        if axes not in self._routes:
            assigned = set(axes)
            self._routes[axes] = []
            for axis, tables in self._feasible.buckets(axes):
                assigned.add(axis)
                self._routes[axes].append(self._step(axis, tables, assigned))
        return self._routes[axes]

    def _step(self, axis: int, tables: Sequence[Factor], assigned: set[int]) -> _Step:
        side = self._sides[axis]
        complete = [i for i, number in enumerate(side.demands) if assigned.issuperset(self._demands[number])]
        return _Step(axis, [self._refusing(axis, table) for table in tables], side.places.some(complete))

    def _refusing(self, axis: int, table: Factor) -> tuple[Axes, Bools]:
        others = tuple(other for other in table.axes if other != axis)
        turned = np.moveaxis(~table.allowed, table.axes.index(axis), -1)
        return others, turned[..., self._feasible.classes[axis]]
