"""Which lines read the value that a cell has for an axis, or what other lines have made of it, so that it can be told
of an axis without any effect where its value ends.

*Verifies*: that the statements ran so in `build` and in a step, on the first rank. *Does not verify*: what becomes of a
value in foreign code, or inside of an object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardproof.trainer.lines.statements import (
    BEGINS,
    BEHIND,
    CUT,
    ENDS,
    TENSOR,
    Moment,
    Statement,
    Told,
    last_word,
    shown,
    unpacked,
)

MOST_READERS = 2
"""Lines of a step that a note names."""

_PASSES_ON = re.compile(r"return [\w.]+$")


def axis_read(moments: Sequence[Moment], axis: str, text: str) -> str:
    """What lines of a step do with the value of an axis, as a part of a sentence; empty where nobody knows.

    Args:
        moments: a `build` and the step behind it, or both in one, as of a `fit`. text: of the value that the cell has.
    """
    rows = [unpacked(ran[0]) for _, ran in moments if 0 in ran]
    if len(rows) != len(moments) or any(row and row[-1].kind == CUT for row in rows):
        return ""
    known, told = set[tuple[str, int]](), list[str]()
    built = _followed(rows[0], (axis, text), known) if len(rows) > 1 else []
    for row in rows[-1:]:
        told += _followed(row, (axis, text), known)
    lines = [*dict.fromkeys(told)]
    if lines:
        more = f" and {len(lines) - MOST_READERS} more lines do" if len(lines) > MOST_READERS else ""
        return f"in {'a step' if len(rows) > 1 else '`fit`'} {'; '.join(lines[:MOST_READERS])}{more}"
    last = " and ".join([*dict.fromkeys(built)][-MOST_READERS:])
    return f"no line of a step reads it, nor what comes of it in `build`, where {last}" if built else ""


def _followed(row: Sequence[Statement], axis: tuple[str, str], known: set[tuple[str, int]]) -> list[str]:
    """What the statements of an operation do that read the value, or a plain one that is made of it.

    Args:
        axis: its name, and the text of the value. known: last word and owner of each path that has such a value; is
            added to.
    """
    found, read = list[str](), dict[tuple[str, int], str]()
    for at, statement in enumerate(row):
        place = statement.file, statement.line
        if _PASSES_ON.match(statement.text):
            continue
        if statement.kind == BEGINS:
            seen = [each for each in statement.values if not each.path.startswith(BEHIND)]
            own = [each for each in seen if _is_axis(each, *axis) or _key(each) in known]
            read.pop(place, None)
            if own:
                read[place] = f"reads {_value(own[0])}{_beside(seen, own)}"
            if own and not _ends(row, at):
                found.append(f"{statement.shown()} {read[place]}")
        elif statement.kind == ENDS and place in read and statement.values:
            known |= {_key(each) for each in statement.values if each.is_plain}
            made = " and ".join(map(_value, statement.values[:MOST_READERS]))
            found.append(f"{statement.shown()} {read.pop(place)} and makes {made}")
    return found


def _ends(row: Sequence[Statement], at: int) -> bool:
    """Whether a statement that begins is told of once more, with what it makes, before it begins anew."""
    own = [each.kind for each in row[at + 1 :] if (each.file, each.line) == (row[at].file, row[at].line)]
    return bool(own) and own[0] == ENDS


def _value(told: Told) -> str:
    return f"`{told.path}` = {shown(told.text)}"


def _beside(seen: Sequence[Told], own: Sequence[Told]) -> str:
    """The tensors of one number that a statement reads beside a value, such as a loss that it weighs."""
    others = [each for each in seen if each not in own and each.text.startswith(TENSOR)]
    return f" beside {' and '.join(map(_value, others[:MOST_READERS]))}" if others else ""


def _is_axis(told: Told, axis: str, text: str) -> bool:
    """Whether a path names the value of an axis, as `cell.lr` and `self.cell.values['lr']` do, or has its name and its
    value, as `group['lr']` may."""
    named = re.search(rf"\bcell\b.*(\.|\[['\"]){axis}\b", told.path)
    return bool(named) or (last_word(told.path) == axis and told.text.strip("'") == text)


def _key(told: Told) -> tuple[str, int]:
    return last_word(told.path), told.owner
