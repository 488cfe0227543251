"""Statements of which the result is larger than all that they read, since broadcasting sets one dimension of samples
against another: of `[8, 1]` and `[8]` it makes `[8, 8]`, which a mean hides.

*Verifies*: the shapes that a statement reads and makes, of tensors under a name. *Does not verify*: that nobody wants
every pair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from shardproof.trainer.lines.setters import begin_of
from shardproof.trainer.lines.statements import BEGINS, ENDS, Moment, Statement, Told, unpacked
from shardproof.trainer.values.wording import at as moment_of

_SHAPE = re.compile(r"[a-z]+[0-9]+[a-z0-9_]* \(([0-9, ]*)\)")

Shape = tuple[int, ...]


def paired(moments: Sequence[Moment]) -> str:
    """A note on the first statement of a step, on the first rank, that sets samples against samples by broadcasting;
    empty where there is none.

    Args:
        moments: the steps of a run.
    """
    for moment in moments:
        row = unpacked(moment.ran[min(moment.ran)]) if moment.ran else ()
        for place, statement in enumerate(row):
            if statement.kind == ENDS and (told := spread(row, place)):
                pairs = "unless every pair is meant, one of them has a dimension too many or too few"
                return f"{statement.shown()} {told} in {moment_of(moment.op)}: {pairs}"
    return ""


def spread(row: Sequence[Statement], end: int) -> str:
    """What a statement makes out of which shapes, where broadcasting sets one dimension against another of the same
    length; empty of all others.

    Args:
        row: the statements that ran. end: the place of its end.
    """
    begin = begin_of(row, end)
    if row[begin].kind != BEGINS:
        return ""
    made = next(filter(None, map(shape_of, row[end].values)), ())
    read = {told.path: shape for told in row[begin].values if (shape := shape_of(told))}
    larger = [path for path, shape in read.items() if prod(shape) >= prod(made)]
    if len(made) < 2 or larger or not _is_pairwise(made, [*read.values()]):
        return ""
    path = next(told.path for told in row[end].values if shape_of(told) == made)
    each = " and ".join(f"`{one}` of {[*shape]}{_made_at(row, begin, one)}" for one, shape in read.items())
    return f"makes `{path}` of {[*made]} out of {each}"


def _is_pairwise(made: Shape, read: Sequence[Shape]) -> bool:
    """Whether one length stands at two places of what is made, and in operands of another number of dimensions at one
    of them each: aligned by their last dimension, and not by one of 1 that somebody put there in both."""
    for one in read:
        for other in read:
            if len(one) <= len(other):
                continue
            wide, short = ([1] * (len(made) - len(shape)) + [*shape] for shape in (one, other))
            if len(wide) != len(made) or len(short) != len(made):
                continue
            mine, its = ([at for at, length in enumerate(shape) if length > 1] for shape in (wide, short))
            against = {(wide[i], short[j]) for i in mine for j in its if short[i] == 1 == wide[j]}
            if any(length == other_length for length, other_length in against):
                return True
    return False


def _made_at(row: Sequence[Statement], begin: int, path: str) -> str:
    """The line that made a value by reading the same name in another shape, in brackets."""
    for place in range(begin - 1, -1, -1):
        each = row[place]
        if each.kind == ENDS and any(told.path == path for told in each.values):
            before = [shape_of(told) for told in row[begin_of(row, place)].values if told.path == path]
            return f" ({each.shown()})" if before and before[0] else ""
    return ""


def shape_of(told: Told) -> Shape:
    """The shape of a tensor that is told by a digest; empty of anything else."""
    found = _SHAPE.match(told.text)
    return tuple(int(one) for one in found[1].split(",") if one.strip()) if found else ()
