"""Which statement set a value last, and where it had that from: a value that it passes on, a condition that it stands
behind, and what a call in that came to.

*Verifies*: that the statements ran so, with these values. *Does not verify*: what foreign code sets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from shardproof.trainer.lines.statements import (
    BEGINS,
    BEHIND,
    ENDS,
    Moment,
    Statement,
    Told,
    last_word,
    shown,
    unpacked,
)
from shardproof.trainer.values import wording


class Setter(NamedTuple):
    """A statement that set a value. moment: how many operations before the last one. at: the place of its end. since:
    what is said of a tensor that has been written in place since; empty of all others."""

    statement: Statement
    moment: int
    at: int
    when: str
    since: str = ""

    def told(self) -> str:
        return f"{self.statement.shown()} set it last, in {self.when}{self.since}"


def set_last(told: Told, moments: Sequence[Moment], rank: int, number: int, back: int = 0) -> Setter | None:
    """Which statement set a value last, and when; None where none is known that set it to this. A local name of a call
    that is over, as of a closure, is known by its value alone.

    Args:
        moments: the operations of a session, until the one that reads it. number: of the statement there that does.
        back: how many operations before the last one that is.
    """
    for at, (op, ran) in [*enumerate(reversed(moments))][back:]:
        statements = unpacked(ran[rank]) if rank in ran else ()
        end = number if at == back else len(statements)
        for place in range(end - 1, -1, -1):
            statement = statements[place]
            for made in statement.values if statement.kind == ENDS else ():
                mine = made.owner == told.owner and last_word(made.path) == last_word(told.path)
                local = told.owner < 0 and made.owner < 0 and made.path == told.path and made.text == told.text
                if not mine and not local:
                    continue
                when = wording.at(op)
                # An object may have the number of another one that is gone. A tensor may be written since.
                right = made.text == told.text or not told.is_plain
                if not right:
                    return None
                since = (
                    "" if made.text == told.text else _written_since(told, moments, rank, (at, place), (back, number))
                )
                return Setter(statement, at, place, when if at or op.kind != "step" else "this step", since)
    return None


_IN_PLACE = re.compile(r"^[\w.]+(\[.*\])?\s*[-+*/@%|&]=|\.[a-z]\w*[a-z]_\(|^[\w.]+\[.*\]\s*=[^=]")
"""Statements that write into a tensor."""

MOST_WRITERS = 2
"""Statements that a sentence names which may have written into a tensor."""


def _written_since(
    told: Told, moments: Sequence[Moment], rank: int, setter: tuple[int, int], reader: tuple[int, int]
) -> str:
    """That a tensor is another one than a statement made it, though no line assigns to it, and which statements write
    into tensors of its dtype meanwhile, with a comma in front.

    Args:
        setter, reader: of the statements that set and read it, how many operations before the last one they ran, and
            their place there.
    """
    dtype, found = told.text.partition(" (")[0], dict[str, None]()
    for back in range(setter[0], reader[0] - 1, -1):
        ran = moments[-1 - back].ran
        row = unpacked(ran[rank]) if rank in ran else ()
        row = row[setter[1] + 1 if back == setter[0] else 0 : reader[1] if back == reader[0] else len(row)]
        for each in row:
            writes = each.kind == ENDS and _IN_PLACE.search(each.text)
            if writes and any(not one.is_plain and one.text.startswith(f"{dtype} (") for one in each.values):
                found.setdefault(each.shown())
    by = f", as {' and '.join([*found][:MOST_WRITERS])} may have done" if found else ""
    return f", and something has written into it since{by}"


MOST_BACK = 3
"""How often one goes back from a value to what it was made of."""


_PASSES_ON = re.compile(r"(?:return|\w+ =) ([\w.]+\.\w+)$")


def who_set_read(
    rows: Sequence[Sequence[Statement]], places: Sequence[tuple[str, int]], names: tuple[str, str],
    moments: tuple[Sequence[Moment], Sequence[Moment]],
) -> str:  # fmt: skip
    """Who set an attribute that a statement of one way does no more than pass on, with a space in front; empty where
    none does.

    Args:
        rows: what ran on the first rank, in both ways. places: file and line of a statement of each. names: of the
            ways, such as `with n=1`. moments: as in `set_last`.
    """
    told = list[str]()
    for row, place, name, own in zip(rows, places, names, moments, strict=True):
        at = next((at for at, each in enumerate(row) if each.place == (*place, BEGINS)), -1)
        passed = _PASSES_ON.match(row[at].text) if at >= 0 else None
        value = next((each for each in row[at].values if each.path == passed[1]), None) if passed else None
        setter = set_last(value, own, 0, at) if value else None
        if value and setter:
            when = f"{setter.statement.shown()} set `{value.path}` last, in {setter.when}"
            told.append(f" In the run {name} {when}.")
    return "".join(told)


def came_from(told: Told, setter: Setter, moments: Sequence[Moment], rank: int, depth: int = 0) -> str:
    """Out of what a statement set a value that it did no more than pass on, and who had set that, with a comma in
    front; empty of all others.

    Args:
        moments: as in `set_last`.
    """
    row = unpacked(moments[-1 - setter.moment].ran[rank])
    begin = begin_of(row, setter.at)
    right = setter.statement.text.partition("=")[2].partition("#")[0].strip().replace('"', "'")
    if _CONSTANT.fullmatch(right) and not depth:
        return _decided_by(row, begin)
    source = next((each for each in row[begin].values
                   if right == each.path and each.text == told.text and each.path != told.path), None)  # fmt: skip
    adds = re.match(r"[^=]*[-+*/@%]=", setter.statement.text)
    if adds or source is None or depth == MOST_BACK:
        return ""
    before = set_last(source, moments, rank, begin, setter.moment)
    made = None if before else _made_whole(source, row, begin)
    if made is not None:
        before = Setter(row[made], setter.moment, made, setter.when)
        whole = f", which {row[made].shown()} made"
        return f", out of `{source.path}`{whole}{came_from(source, before, moments, rank, depth + 1)}"
    if before is None:
        return f", out of `{source.path}`"
    return f", out of `{source.path}`; {before.told()}{came_from(source, before, moments, rank, depth + 1)}"


_CONSTANT = re.compile(r"True|False|None|-?[0-9.]+|'[^']*'")

MOST_ABOVE = 4
"""Lines between a condition and what it decides about."""

MOST_READ = 3
"""Values of a condition that a sentence names."""


def _decided_by(row: Sequence[Statement], number: int) -> str:
    """The `if` or loop that stands right above a statement that sets a constant, and ran before it, with what it and
    the `return` of what it called read, with a comma in front; empty where there is none."""
    own = row[number]
    above = [each for each in reversed(row[:number]) if each.kind == BEGINS and each.file == own.file
             and 0 < own.line - each.line <= MOST_ABOVE
             and each.text.startswith(("if ", "elif ", "while "))]  # fmt: skip
    head = max(above, key=lambda each: each.line, default=None)
    if head is None:
        return ""
    inside = row[max(at for at in range(number) if row[at] is head) : number]
    called = [each for each in inside if each.kind == BEGINS and each.text.startswith("return ")]
    return f", behind {with_values(head)}{f'; it came to {with_values(called[-1])}' if called else ''}"


def with_values(statement: Statement) -> str:
    """A statement as a sentence has it, with the plain values that it read."""
    read = [each for each in statement.values if each.is_plain and not each.path.startswith(BEHIND)][:MOST_READ]
    values = " and ".join(f"`{each.path}` = {shown(each.text)}" for each in read)
    return f"{statement.shown()}{f', which read {values}' if values else ''}"


def _made_whole(told: Told, row: Sequence[Statement], number: int) -> int | None:
    """Where the latest statement before another one begins that assigns to the name that a path begins with, such as
    `state` of `state['step']`."""
    name = re.match(r"(\w+)\[", told.path)
    assigns = re.compile(rf"{name[1]}(\s*:[^=]+)?\s*=[^=]") if name else None
    found = (at for at in range(number - 1, -1, -1)
             if assigns and row[at].kind == BEGINS and assigns.match(row[at].text))  # fmt: skip
    return next(found, None)


def begin_of(row: Sequence[Statement], at: int) -> int:
    """Where in a row a statement begins of which another moment is told at a place; that place if it begins nowhere."""
    begins = (row[at].file, row[at].line, BEGINS)
    return next((place for place in range(at, -1, -1) if row[place].place == begins), at)


_CALLS = re.compile(r"[\w., ]+=\s*[\w.]+\(.*\)\s*(#.*)?$")


def given_by(rows: Sequence[Sequence[Statement]], setters: Sequence[Setter], ways: Sequence[str]) -> str:
    """Which `return` of the trainer's own gave what statements set that do no more than call, with the plain values
    that it read, in a sentence with a space in front; empty where none is known of either.

    Args:
        rows: what ran in the operations of the setters. ways: what a sentence calls them.
    """
    told = dict[str, list[str]]()
    for row, setter, way in zip(rows, setters, ways, strict=True):
        if not _CALLS.match(setter.statement.text):
            return ""
        inside = row[begin_of(row, setter.at) : setter.at]
        returns = [each for each in inside if each.kind == BEGINS and each.text.startswith("return ")]
        if not returns:
            return ""
        told.setdefault(with_values(returns[-1]), []).append(way)
    each = [
        f"{place}{',' * (', which read' in place)} gave it in {' and in '.join(own)}" for place, own in told.items()
    ]
    return f" {'; '.join(each)}."


MOST_APART = 3
"""Values that two calls read otherwise which a sentence names."""


def handed_apart(callers: Sequence[Statement], path: str, names: Sequence[str]) -> str:
    """Which calls hand an argument over in two ways, with the plain values that they read otherwise, in a sentence with
    a space in front.

    Args:
        callers: the begins of the statements that call, one of each way. path: of the argument.
    """
    read = [{each.path: each.text for each in caller.values if each.is_plain and not each.path.startswith(BEHIND)}
            for caller in callers]  # fmt: skip
    apart = [[f"`{path}` = {shown(text)}" for path, text in own.items() if (last_word(path), text) not in
              {(last_word(name), value) for name, value in its.items()}][:MOST_APART]
             for own, its in (read, read[::-1])]  # fmt: skip
    each = [
        f"{caller.shown()} {name}{', which reads ' + ' and '.join(own) if own else ''}"
        for caller, name, own in zip(callers, names, apart, strict=True)
    ]
    return f" `{path}` is an argument there: it is handed over by {each[0]}, and by {each[1]}."
