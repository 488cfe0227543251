"""Whether two ways hold the same elements at other places, such as a batch that begins a few tokens later.

That is what a mistake in a data set, a sampler or an index comes to, and the first element that differs does not show
it. Rows are looked at before elements: a tensor of several dims whose rows have moved is said in rows.

*Verifies*: what is said holds for every row or element of both sides that can face another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.arrangement import DISTINCT, distinct, moved_along
from shardproof.diff import Difference, as_numbers
from shardproof.observe.logical import Value
from shardproof.trainer.values.every_mesh import Name

Numbered = npt.NDArray[Any]


def arranged(
    wrong: Sequence[Difference], one: Mapping[Name, Value], other: Mapping[Name, Value], ways: tuple[str, str]
) -> str:
    """A sentence on the first of `wrong` whose elements are only at other places; empty where there is none.

    Args:
        one, other: what either way holds. ways: how they are called, such as `seq=40` and `seq=12`.
    """
    for difference in wrong:
        key = difference.key.role, difference.key.fqn
        there = difference.kind == "bits" and key in one and key in other
        if there and (told := _of_values(one[key], other[key], ways)):
            return f"{difference.key.fqn} {told}"
    return ""


def _of_values(one: Value, other: Value, ways: tuple[str, str]) -> str:
    if not one.shape or one.shape != other.shape or one.dtype != other.dtype:
        return ""
    if len(one.shape) > 1 and (told := _told(*_rows(one, other), "rows", ways)):
        return told
    numbers = as_numbers(other)
    coarse = numbers.astype(np.float16) if numbers.dtype.kind == "f" else numbers
    if distinct(coarse) < DISTINCT:  # such as a first step's plus and minus the learning rate, whose places are chance
        return ""
    return _told(as_numbers(one), numbers, "elements", ways)


def _rows(one: Value, other: Value) -> tuple[Numbered, Numbered]:
    """The rows of both sides as numbers, equal where all bits of the rows are."""
    seen: dict[bytes, int] = {}

    def numbered(value: Value) -> npt.NDArray[Any]:
        rows = as_numbers(value).reshape(value.shape[0], -1)
        return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows])

    return numbered(one), numbered(other)


def _told(one: Numbered, other: Numbered, what: str, ways: tuple[str, str]) -> str:
    apart = np.flatnonzero(one != other)
    if not len(apart) or distinct(other) < DISTINCT:
        return ""
    if by := moved_along(one, other, int(apart[0])):
        places = "1 place" if abs(by) == 1 else f"{abs(by)} places"
        return f"has the same {what} {places} {'earlier' if by > 0 else 'later'} with {ways[1]} than with {ways[0]}."
    if sorted(one.tolist()) == sorted(other.tolist()):
        return f"has the same {what} with {ways[0]} and with {ways[1]}, in another order."
    return ""
