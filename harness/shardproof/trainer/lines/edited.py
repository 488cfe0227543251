"""What a statement does to some elements of a tensor that it reads: it makes the same but for these, and these one
number, as a mask does.

*Verifies*: that the elements are so. *Does not verify*: that the statement should not do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardproof.trainer.lines.held import Numbers, numbers_of
from shardproof.trainer.lines.statements import BEGINS, ENDS, RESULT, Outline, Statement

LEAST = 4
"""Fewer elements may be alike by chance."""

MOST_COMMON = 2
"""Values that a sentence names which are one number just there."""


def edited(row: Sequence[Statement], outlines: Mapping[str, Outline], place: tuple[str, int]) -> str:
    """What a statement makes out of a tensor of which most elements stay, with a comma in front: of which it was, how
    many are another number, and what else is one number just there. Empty of all others.

    Args:
        row: what ran in an operation. outlines: text of a tensor → its outline. place: file and line of the statement.
    """
    read, made = _values(row, outlines, place)
    for path, after in made.items():
        for source, before in read.items():
            if not _is_mostly(before, after):
                continue
            apart = before != after
            number = after[apart][0]
            if not (after[apart] == number).all():
                continue
            others = ((name, each) for name, each in read.items() if name not in (source, path))
            common = [*_just_there(apart, others)][:MOST_COMMON]
            where = f", just where {' and '.join(common)}" if common else ""
            what = "what it was" if source == path else f"`{source}`"
            which = f"{int(apart.sum())} of {apart.size} elements, which are {number:.6g}"
            return f", which is {what} but for {which}{where}"
    return ""


def _is_mostly(before: Numbers, after: Numbers) -> bool:
    """Whether of two tensors most elements that are not zero are the same, and some are not."""
    if before.shape != after.shape or before.size < LEAST:
        return False
    same, counted = before == after, before != 0
    return not same.all() and int((same & counted).sum()) * 2 >= int(counted.sum()) > 0


def _just_there(apart: Numbers, others: Iterator[tuple[str, Numbers]]) -> Iterator[str]:
    for name, values in others:
        if values.shape == apart.shape:
            number = values[apart][0]
            if number == round(float(number)) and np.array_equal(values == number, apart):
                yield f"`{name}` is {int(number)}"


def _values(
    row: Sequence[Statement], outlines: Mapping[str, Outline], place: tuple[str, int]
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """The tensors that a statement read and made, each over all of its times; those that it had not every time, or not
    in one width, are left out."""
    found: tuple[dict[str, list[Outline]], dict[str, list[Outline]]] = {}, {}
    times = 0
    for each in row:
        if each.place not in ((*place, BEGINS), (*place, ENDS)):
            continue
        times += each.kind == ENDS
        own = found[each.kind == ENDS]
        for path, text in {told.path: told.text for told in each.values}.items():
            outline = outlines.get(text)
            whole = outline is not None and len(outline.shape) <= 2 and not outline.is_of_rows  # and no sums
            if outline is not None and whole and not path.startswith(RESULT):
                own.setdefault(path, []).append(outline)
    read, made = ({path: numbers_of(own) for path, own in side.items() if len(own) == times} for side in found)
    return _in_one(read), _in_one(made)


def _in_one(every: Mapping[str, Sequence[Numbers]]) -> dict[str, Numbers]:
    return {path: np.concatenate(own) for path, own in every.items() if len({each.shape[1] for each in own}) == 1}
