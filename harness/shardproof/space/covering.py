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
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np
import numpy.typing as npt

from shardproof.space.feasible import Axes, Bools, Factor, Feasible, Ints

Rows = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]
Columns = Places
Floats = npt.NDArray[np.float64]

COVERED = 0
LARGEST_BATCH = 128
BATCH_SHARE = 16


@dataclass(frozen=True)
class _Places:
    """Where combinations lie in one array that holds a table for each of several tuples of axes, one after the other.

    offsets: of each table. axes, strides, shapes (most axes of a table, tables) and (…, 1): each table's axes, and how
    far apart two values of them lie; filled up with strides of 0. All in int32: a find takes longer to get its memory
    than to calculate, and no such array has two thousand million entries.
    """

    offsets: Places
    axes: Places
    strides: Places

    @classmethod
    def from_tables(cls, tables: Sequence[Axes], sizes: Sequence[int]) -> _Places:
        most = max(map(len, tables), default=0)
        axes, strides = np.zeros((most, len(tables)), np.int32), np.zeros((most, len(tables), 1), np.int32)
        lengths = [0]
        for number, table in enumerate(tables):
            length = 1
            for place in reversed(range(len(table))):
                axes[place, number], strides[place, number, 0] = table[place], length
                length *= sizes[table[place]]
            lengths.append(length)
        return cls(np.array([*accumulate(lengths)][:-1], np.int32), axes, strides)

    def some(self, numbers: Sequence[int]) -> _Places:
        """The places in some of the tables."""
        return _Places(self.offsets[list(numbers)], self.axes[:, list(numbers)], self.strides[:, list(numbers)])

    def find(self, columns: Columns) -> Places:
        """The place of each row's combination in each table, shape (tables, rows)."""
        found = np.zeros((len(self.offsets), columns.shape[1]), np.int32)
        found += self.offsets[:, np.newaxis]
        for axes, strides in zip(self.axes, self.strides, strict=True):
            part = columns.take(axes, axis=0)
            part *= strides
            found += part
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
        turned = [np.moveaxis(tables[axes], axes.index(axis), -1).reshape(-1, sizes[axis]) for axes in demands]
        places = _Places.from_tables([_without(axes, axis) for axes in demands], sizes)
        return cls(numbers, places, np.concatenate([np.empty((0, sizes[axis]), np.int8), *turned]))


class _Sides:
    """What is open, once for each axis.

    of: axis → its side. all: the sides one after the other in one array of which they are views, so that what rows
    cover is struck out of all at once.
    """

    def __init__(self, tables: Mapping[Axes, npt.NDArray[np.int8]], sizes: Sequence[int]) -> None:
        sides = [_Side.from_tables(axis, tables, sizes) for axis in range(len(sizes))]
        self.all = np.concatenate([np.empty(0, np.int8), *(side.open.ravel() for side in sides)])
        parts = np.split(self.all, [*accumulate(side.open.size for side in sides)][:-1])
        self.of = [replace(side, open=part.reshape(side.open.shape)) for side, part in zip(sides, parts, strict=True)]
        turned = [(*_without(axes, axis), axis) for axis in range(len(sizes)) for axes in tables if axis in axes]
        self._places = _Places.from_tables(turned, sizes)

    def cover(self, columns: Columns) -> None:
        self.all[self._places.find(columns)] = COVERED


def _without(axes: Axes, axis: int) -> Axes:
    at = axes.index(axis)
    return axes[:at] + axes[at + 1 :]


@dataclass(frozen=True)
class _Step:
    """How one axis is assigned, after those of the steps before it.

    complete: places of the demands that are complete with it, in the axis's `_Side`. refused, shape (places, values of
    the axis): what it must not be, table after table. starts, shape (tables, 1), strides, shape (tables, axes): where
    each table starts, and how far apart two classes of an axis lie in it.
    """

    axis: int
    complete: _Places
    refused: Bools
    starts: Ints
    strides: Floats

    def refuses(self, classes: Floats) -> Bools:
        """Which values of the axis the tables refuse after these classes of each row, shape (rows, values)."""
        places = (self.strides @ classes).astype(np.int64) + self.starts
        found: Bools = np.logical_or.reduce(self.refused.take(places, axis=0), axis=0)
        return found


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
        self._places = _Places.from_tables(self._demands, self._sizes)
        self._open = np.concatenate([np.empty(0, np.int64), *(table.ravel() for table in tables.values())])
        self._sides = _Sides(tables, self._sizes)
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
            left = np.add.reduceat(self._open, self._places.offsets)
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
        self._sides.cover(columns)
        self._rows.append(columns.T.astype(np.int64))

    def _complete(self, axes: Axes, cells: Rows) -> Columns:
        """The rows that start with `cells` on `axes`."""
        columns = np.zeros((len(self._sizes), len(cells)), np.int32)
        classes = np.zeros(columns.shape)
        columns[list(axes)] = cells.T
        for axis in axes:
            classes[axis] = self._feasible.classes[axis].take(columns[axis])
        for step in self._route(axes):
            axis = step.axis
            found = step.complete.find(columns)
            scores = np.empty((1 + len(found), len(cells), self._sizes[axis]), np.float32)
            scores[0] = self._random.random((len(cells), self._sizes[axis]), np.float32)
            if axis in self._cost:
                scores[0] = scores[0] * 0.01 - self._cost[axis].astype(np.float32)
            scores[1:] = self._sides.of[axis].open.take(found, axis=0)
            score = np.add.reduce(scores, axis=0)
            score[step.refuses(classes)] = -np.inf
            columns[axis] = score.argmax(axis=1)
            classes[axis] = self._feasible.classes[axis].take(columns[axis])
        return columns

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
        side = self._sides.of[axis]
        complete = [i for i, number in enumerate(side.demands) if assigned.issuperset(self._demands[number])]
        refused = [np.empty((0, self._sizes[axis]), np.bool_), *(self._refusing(axis, table) for table in tables)]
        starts = np.array([*accumulate(map(len, refused))][:-1], np.int64)[:, np.newaxis]
        strides = np.zeros((len(tables), len(self._sizes)))
        for number, table in enumerate(tables):
            stride = 1
            for other, size in reversed(list(zip(table.axes, table.allowed.shape, strict=True))):
                if other != axis:
                    strides[number, other], stride = stride, stride * size
        return _Step(axis, side.places.some(complete), np.concatenate(refused), starts, strides)

    def _refusing(self, axis: int, table: Factor) -> Bools:
        """What a table refuses: a row for each combination of classes of its other axes, over the axis's values."""
        turned = np.moveaxis(~table.allowed, table.axes.index(axis), -1)
        return turned.take(self._feasible.classes[axis], axis=-1).reshape(-1, self._sizes[axis])
