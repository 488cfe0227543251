"""Which statement called what ran, and what may have decided whether a statement ran: an `if`, a loop or a conditional
expression that holds it, one before it that jumps, or one of these around a call that led to it.

*Verifies*: that the statements stand and ran so. *Does not verify*: what foreign code decides, such as an iterator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardproof.trainer.lines.statements import (
    BEGINS,
    CALLS,
    ENDS,
    RETURNS,
    Statement,
    compounds_of,
    kinds_of,
    unpacked,
)

MOST_HEADS = 6
"""Statements of which one may have decided whether another one runs."""


class Within(NamedTuple):
    """Where a moment lies. frame: the number of the call. caller: the place, among the statements, of the begin of the
    one that made the call; -1 where none is known."""

    frame: int
    caller: int


@lru_cache(maxsize=64)
def within(data: bytes) -> tuple[Within, ...]:
    """Return the call in which each statement ran, in the order of `unpacked`."""
    found, frames, begun = list[Within](), [Within(0, -1)], dict[int, int]()
    row, number, at = unpacked(data), 0, 0
    for kind in kinds_of(data):
        if kind == CALLS:
            number += 1
            frames.append(Within(number, begun.get(frames[-1].frame, -1)))
        elif kind == RETURNS:
            frames = frames[:-1] or frames
        else:
            if row[at].kind == BEGINS:
                begun[frames[-1].frame] = at
            found.append(frames[-1])
            at += 1
    return (*found, *[frames[0]] * (len(row) - at))


_HEAD = re.compile(r"(if|elif|for|while|async for) ")
_EXPRESSION = re.compile(r".* if .* else ")


def heads_of(data: bytes) -> dict[tuple[str, int], list[Statement]]:
    """File and line of a statement → what may have decided about its first time, the nearest first."""
    row, inside, ends = unpacked(data), within(data), compounds_of(data)
    heads, found = dict[int, list[int]](), dict[tuple[str, int], list[Statement]]()

    def deciding(at: int) -> Iterator[int]:
        """The heads before a statement in its own call, and then those around the calls that led to it."""
        while at >= 0:
            for head in heads.get(inside[at].frame, ()):
                end, jumps = ends.get((row[head].file, row[head].line), (0, False))
                if row[head].line < row[at].line <= end or (jumps and end < row[at].line):
                    yield head
            at = inside[at].caller
            if at >= 0 and _EXPRESSION.match(row[at].text):
                yield at

    for at, statement in enumerate(row):
        place = statement.file, statement.line
        if statement.kind != BEGINS:
            continue
        if place not in found:
            found[place] = [row[head] for head, _ in zip(deciding(at), range(MOST_HEADS), strict=False)]
        if place in ends and _HEAD.match(statement.text):
            own = heads.setdefault(inside[at].frame, [])
            own[:] = [at, *(head for head in own if row[head].line != statement.line)]
    return found


def called_by(ran: Sequence[bytes], at: Sequence[int], ways: Sequence[str]) -> str:
    """Which statements made the calls in which two ways ran a statement, where these are not the same, in brackets.

    Args:
        ran: what ran, in both ways. at: the places of the statement there. ways: what a sentence calls them.
    """
    callers = [within(data)[number].caller for data, number in zip(ran, at, strict=True)]
    if min(callers) < 0:
        return ""
    one, other = (unpacked(data)[caller] for data, caller in zip(ran, callers, strict=True))
    if one.place == other.place:
        return ""
    return f" (called by {one.shown()} in {ways[0]} and by {other.shown()} in {ways[1]})"


def handed_over(data: bytes, place: tuple[str, int], path: str) -> Statement | None:
    """The statement whose call hands an argument over that a statement reads the first time; None where no statement
    of the trainer's own makes the call, or where one makes the value in it.

    Args:
        place: file and line of the statement that reads it. path: what it is called there.
    """
    row, inside = unpacked(data), within(data)
    at = next((at for at, each in enumerate(row) if each.place == (*place, BEGINS)), -1)
    if at < 0 or not path.isidentifier() or inside[at].caller < 0:
        return None
    made = (
        each for number, each in enumerate(row[:at]) if each.kind == ENDS and inside[number].frame == inside[at].frame
    )
    if any(told.path == path for each in made for told in each.values):
        return None
    return row[inside[at].caller]
