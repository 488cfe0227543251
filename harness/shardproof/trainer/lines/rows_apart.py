"""In which rows, or elements, a value is not alike in two ways, and what these have in common: another value that both
ways have alike, such as a mask or labels, and that is one number just there.

*Verifies*: that the other value has this number in these places and in no other. *Does not verify*: that it is why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.trainer.lines.held import Numbers, Values, close_to, numbers_of, scale_of
from shardproof.trainer.lines.statements import RESULT, Outline

MOST_ROWS_TOLD, MOST_COMMON = 3, 2
"""Numbers of rows that are told, and values that have something in common with them."""

LEAST_PLACES = 4
"""Among fewer places any value may be one number just there."""

MOST_NUMBERS = 256
"""So large a number of a label, a token or a position may be; what is larger is measured rather than counted."""


def rows_apart(mine: Values, its: Values, ways: tuple[Mapping[Any, Values], Mapping[Any, Values]], near: float) -> str:
    """Which rows are not alike, and what they have in common, with a space in front; empty where nothing is known.

    Args:
        mine, its: a value in two ways that is neither cut nor shaped otherwise. ways: site → all that either way has.
    """
    one, other = _whole(mine.outlines), _whole(its.outlines)
    if one is None or other is None or one.shape != other.shape:
        return ""
    apart = np.asarray(~close_to(one, other, near, scale_of([one, other])))
    rows = np.flatnonzero(apart.any(axis=1))
    if not 0 < int(apart.sum()) < apart.size:
        return ""
    few = len(mine.outlines) == 1 and 0 < len(rows) < len(one) and len(rows) <= MOST_ROWS_TOLD
    what = "element" if all(len(each.shape) == 1 for each in mine.outlines) else "row"
    told = f" ({what}{'s' * (len(rows) > 1)} {' and '.join(map(str, rows))}, counted from 0)" if few else ""
    common = list(dict.fromkeys(_common(apart, ways)))[:MOST_COMMON]
    return f"{told}{', just where ' * bool(common)}{' and '.join(common)}"


def _common(apart: npt.NDArray[np.bool_], ways: tuple[Mapping[Any, Values], Mapping[Any, Values]]) -> Iterator[str]:
    """Name the values, such as a mask, of which one number stands in the places that are apart and nowhere else."""
    known = set[str]()
    for site, values in ways[0].items():
        its = ways[1].get(site)
        if (
            its is None
            or site.path in known
            or site.path.startswith(RESULT)
            or len(values.outlines) != len(its.outlines)
        ):
            continue
        if any(len(each.shape) > 2 for each in values.outlines):
            continue  # whose numbers are sums
        one, other = _whole(values.outlines), _whole(its.outlines)
        if one is None or other is None or not np.array_equal(one, other):
            continue
        for places in _fitting(apart, one):
            number = one[places][0]
            whole = number == round(float(number)) and abs(number) <= MOST_NUMBERS
            if whole and np.array_equal(one == number, places):
                known.add(site.path)
                yield f"`{site.path}` is {int(number)} ({values.statement.shown()})"


def _fitting(apart: npt.NDArray[np.bool_], values: Numbers) -> Iterator[npt.NDArray[np.bool_]]:
    """The places that are apart in the shape of other values: element by element, or row by row."""
    if values.size < LEAST_PLACES:
        return
    rows = apart.any(axis=1, keepdims=True)
    if apart.shape == values.shape:
        yield apart
    elif values.shape == rows.shape and not rows.all():
        yield np.asarray(rows)
    elif values.size == apart.size:  # such as labels of several rows beside one loss of each
        yield apart.reshape(values.shape)


def _whole(outlines: Sequence[Outline]) -> Numbers | None:
    """All numbers of a value in two dimensions; None where its parts are of several widths, or sums of rows."""
    numbers = numbers_of(outlines)
    if not numbers or any(each.is_of_rows for each in outlines) or len({each.shape[1] for each in numbers}) > 1:
        return None
    return np.concatenate(numbers)
