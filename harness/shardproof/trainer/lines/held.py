"""Whether two ways have a value alike that may be cut otherwise in each: into other micro-batches, over other ranks, or
with other padding.

*Verifies*: that its rows are the same, in any order and as far as the shorter ones reach; or, where one way is cut
otherwise than the other, its sum, its mean or its last value; or all of its numbers but zeros. *Does not verify*:
values of another number of dimensions, unless they have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardproof.trainer.lines.statements import Outline, Statement

Numbers = npt.NDArray[np.float64]

CLOSE = 2.0**-13
"""The share of a number in single precision by which the order of sums may make it another one."""

MOST_ROWS, MOST_RAGGED = 256, 64
"""Of a value in one way, and of one whose rows are not equally long; with more, nobody looks for the same row."""


class Values(NamedTuple):
    """What a statement read or made under a path, each time, on all ranks. statement: the first of these. last: what it
    was last on each rank."""

    statement: Statement
    outlines: list[Outline]
    last: dict[int, Outline]


def held(mine: Values, its: Values, near: float) -> bool | None:
    """Whether two ways have a value alike; None where nobody can tell."""
    every = [*mine.outlines, *its.outlines]
    if any(each.is_of_rows for each in every):
        if len({each.shape[1:] for each in every}) > 1:
            return None  # rows that go on have other sums
        mine, its = of_rows(mine), of_rows(its)
    shapes = [sorted(each.shape for each in way.outlines) for way in (mine, its)]
    kinds = {(len(shape), shape[2:]) for way in shapes for shape in way}
    ways = [numbers_of(way.outlines) for way in (mine, its)]
    if not all(ways) or max(sum(map(len, way)) for way in ways) > MOST_ROWS:
        return None
    if len(kinds) != 1:
        return _same_elements(ways, near)
    scale = scale_of([*ways[0], *ways[1]])
    close = partial(close_to, near=near, scale=scale)
    if shapes[0] == shapes[1] and len(mine.last) == len(its.last):
        return _rows_held(ways, close)  # neither is cut otherwise than the other
    last = [numbers_of(way.last.values()) for way in (mine, its)]
    if _summed(ways, close) or _summed(last, close):
        return True
    rows, widths = [sum(map(len, way)) for way in ways], [{each.shape[1] for each in way} for way in ways]
    if rows[0] == rows[1] or widths[0] == widths[1]:
        if _rows_held(ways, close):
            return True
        filled = rows[0] != rows[1] or len(widths[0] | widths[1]) > 1
        turned = [[each.T for each in way] for way in ways]
        return filled and (_rows_held(turned, close) or _same_but_for_zeros(ways, close))
    if pieces := _cut_along(ways):
        # the same elements in other pieces may be cut otherwise, as in turns, or be put together wrongly
        return _rows_held(pieces, close) or (None if _same_but_for_zeros(ways, close) else False)
    if _same_but_for_zeros(ways, close):
        return True
    return False if sum(each.size for each in ways[0]) == sum(each.size for each in ways[1]) else None


def is_sum_of_ranks(mine: Values, its: Values, near: float) -> bool:
    """Whether a value of one rank is the sum of those that several ranks have of it last in the other way, which are
    not all the same."""
    few, many = sorted((numbers_of(way.last.values()) for way in (mine, its)), key=len)
    if len(few) != 1 or len(many) < 2 or len({each.shape for each in (*few, *many)}) != 1:
        return False
    close = partial(close_to, near=near, scale=scale_of([*few, *many]))
    return bool(close(few[0], np.sum(many, axis=0)).all()) and not all(close(many[0], each).all() for each in many)


def of_rows(values: Values) -> Values:
    """The same values, of which the sums of rows alone are known."""
    last = {rank: each.of_rows for rank, each in values.last.items()}
    return Values(values.statement, [each.of_rows for each in values.outlines], last)


def _same_but_for_zeros(ways: Sequence[Sequence[Numbers]], close: _Close) -> bool:
    """Whether all numbers but zeros are the same in both ways, wherever they stand."""
    flat = [np.sort(np.concatenate([each[each != 0] for each in way])) for way in ways]
    return len(flat[0]) == len(flat[1]) and bool(close(flat[0], flat[1]).all())


def _same_elements(ways: Sequence[Sequence[Numbers]], near: float) -> bool | None:
    """Whether all numbers of two ways are the same but for their places, as of what one makes column by column; None
    where they are not, which says nothing of values of other shapes."""
    flat = [np.sort(np.concatenate([each.ravel() for each in way])) for way in ways]
    same = len(flat[0]) == len(flat[1]) and close_to(flat[0], flat[1], near, scale_of(flat)).all()
    return True if same else None


def numbers_of(outlines: Iterable[Outline]) -> list[Numbers]:
    """The numbers of outlines, each in two dimensions."""
    return [each.numbers.astype(np.float64).reshape(len(each.numbers), -1) for each in outlines]


_Close = Callable[[Numbers, Numbers], npt.NDArray[np.bool_]]


def close_to(one: Numbers, other: Numbers, near: float, scale: float) -> npt.NDArray[np.bool_]:
    """Which numbers are the same but for rounding; NaN is as NaN."""
    with np.errstate(all="ignore"):
        room = near * np.maximum(np.maximum(np.abs(one), np.abs(other)), scale)
        same: npt.NDArray[np.bool_] = (one == other) | (np.isnan(one) & np.isnan(other)) | (np.abs(one - other) <= room)
    return same


def scale_of(all_of_it: Sequence[Numbers]) -> float:
    """The median size of all numbers that are neither zero nor infinite."""
    sizes = np.abs(np.concatenate([each.ravel() for each in all_of_it]))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    return float(np.median(sizes)) if sizes.size else 0.0


def _summed(ways: Sequence[Sequence[Numbers]], close: _Close) -> bool:
    """Whether the sums, the means or the last ones of values in two ways are the same, if all have one shape."""
    if len({each.shape for way in ways for each in way}) != 1:
        return False
    sums = [np.sum(way, axis=0) for way in ways]
    means = [total / len(way) for total, way in zip(sums, ways, strict=True)]
    return any(close(one, other).all() for one, other in (sums, means, [way[-1] for way in ways]))


def _rows_held(ways: Sequence[Sequence[Numbers]], close: _Close) -> bool:
    """Whether each row of the way that has fewer is among those of the other, from the left or from the right as far as
    the shorter of two reaches."""
    if len({each.shape[1] for way in ways for each in way}) == 1:
        fewer, more = sorted((np.concatenate([*way]) for way in ways), key=len)
        if len(fewer) == len(more) and close(fewer, more).all():
            return True
        left = np.ones(len(more), bool)
        return bool(len(fewer)) and all(_taken(row, more, left, close) for row in fewer)
    rows = [[row for each in way for row in each] for way in ways]
    if max(map(len, rows)) > MOST_RAGGED:
        return True  # nobody looks
    few, many = sorted(rows, key=len)
    return any(_ragged_held(few, many, close, right=right) for right in (False, True))


def held_in_pieces(mine: Values, its: Values, near: float) -> bool | None:
    """Whether two ways have a value alike of which the one has each row in even pieces, as ranks that share a sequence;
    None where they do not have it so, or all of it is one number."""
    ways = [numbers_of(way.outlines) for way in (mine, its)]
    kinds = {(len(each.shape), each.shape[2:]) for way in (mine, its) for each in way.outlines}
    pieces = _cut_along(ways) if len(kinds) == 1 and not any(each.is_of_rows for each in mine.outlines) else []
    if not pieces or all((each == each.flat[0]).all() for way in ways for each in way):
        return None
    return _rows_held(pieces, partial(close_to, near=near, scale=scale_of([*ways[0], *ways[1]])))


def _cut_along(ways: Sequence[Sequence[Numbers]]) -> list[list[Numbers]]:
    """The rows of both ways, those of the longer cut into as many pieces as the other has rows for each, as ranks cut a
    sequence; empty where that does not come out even."""
    few, many = sorted(([row for each in way for row in each] for way in ways), key=len)
    widths = [{len(row) for row in way} for way in (few, many)]
    if not few or [len(each) for each in widths] != [1, 1]:
        return []
    (long,), (short,) = widths
    if len(few) == len(many) or long % short or len(few) * (long // short) != len(many):
        return []
    return [[row.reshape(-1, short) for row in few], [np.stack(many)]]


def _ragged_held(few: Sequence[Numbers], many: Sequence[Numbers], close: _Close, *, right: bool) -> bool:
    """The same of rows that are not equally long, held side by side from one end."""
    left = sorted(many, key=len, reverse=True)
    for row in sorted(few, key=len, reverse=True):
        width = [min(len(row), len(each)) for each in left]
        parts = ((row[len(row) - size :], each[len(each) - size :]) if right else (row[:size], each[:size])
                 for each, size in zip(left, width, strict=True))  # fmt: skip
        found = next((at for at, pair in enumerate(parts) if close(*pair).all()), None)
        if found is None:
            return False
        del left[found]
    return True


def _taken(row: Numbers, rows: Numbers, left: npt.NDArray[np.bool_], close: _Close) -> bool:
    """Whether a row is among those of others that are left, where it is marked as taken."""
    same = np.flatnonzero(left & close(row, rows).all(axis=1))
    left[same[:1]] = False
    return bool(len(same))
