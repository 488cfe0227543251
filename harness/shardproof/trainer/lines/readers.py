"""Which statements read what another one makes under a local name, so that it is seen where a value goes nowhere.

*Verifies*: that no other statement of the trainer's own reads the name, in the same call or with the same value in
another one, until it is made anew. *Does not verify*: what is read behind an operation, or by foreign code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardproof.trainer.lines.line_values import dtype_told, is_number
from shardproof.trainer.lines.statements import BEGINS, ENDS, TENSOR, Statement

_IN_PLACE = re.compile(r"\w+(\.\w+_\(|\[.*\]\s*[-+*/]?=)")


def read_by(row: Sequence[Statement], place: tuple[str, int]) -> str:
    """What is said of a local tensor or number that a statement makes and that one other line reads, or none; empty of
    all others.

    Args:
        row: the statements of an operation on one rank. place: file and line of the statement.
    """
    readers, made = dict[tuple[str, int], None](), False
    for at, statement in enumerate(row):
        if statement.place != (*place, ENDS):
            continue
        if _IN_PLACE.match(statement.text):
            return ""  # what it writes into may have other names
        for told in statement.values:
            value = told.text.startswith(TENSOR) or dtype_told(told.text) or is_number(told.text)
            if not told.path.isidentifier() or told.owner >= 0 or not value:
                return ""  # what may be changed where it is, or have no text later
            made = True
            readers |= dict.fromkeys(_readers(row[at + 1 :], told.path, told.owner, told.text, place))
    if not made or len(readers) > 1:
        return ""
    if not readers:
        return ", which no other line reads"
    file, line = next(iter(readers))
    return f", which {file}:{line} alone reads"


def _readers(
    row: Sequence[Statement], path: str, owner: int, text: str, place: tuple[str, int]
) -> list[tuple[str, int]]:
    """The statements that read a name until it is made anew."""
    found = list[tuple[str, int]]()
    for statement in row:
        own = [told for told in statement.values if told.path == path and (told.owner == owner or told.text == text)]
        if own and statement.kind == BEGINS and (statement.file, statement.line) != place:
            found.append((statement.file, statement.line))
        if statement.kind == ENDS and any(told.owner == owner for told in own):
            if not re.match(rf"{re.escape(path)}(\[|\.\w+_\()", statement.text):
                break
            found.append((statement.file, statement.line))  # which writes into it, and leaves the rest
    return found
