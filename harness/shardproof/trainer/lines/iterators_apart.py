"""What a run does once more after a load that the run without a break did in an earlier step, such as to make an
iterator: what it read and made otherwise than then, and where it took another turn.

*Verifies*: that both ran the same statement first, and then these. *Does not verify*: iterators of foreign code, and
that an iterator which begins elsewhere on purpose should not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

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

MOST_VALUES = 3
"""Values that a sentence names which the two iterators do not have alike."""

MOST_HELD = 400
"""Statements of an iterator that are held side by side."""


def made_anew(
    windows: tuple[Sequence[Statement], Sequence[Statement]],
    moments: Sequence[Moment],
    rank: int,
    ways: tuple[str, str],
) -> str:
    """What an iterator did otherwise that the second run enters anew in a statement, where the first goes on with its
    own, with a space in front; empty where it does nothing otherwise, or enters none.

    Args:
        windows: what ran while the statement did, in both runs. moments: the operations of the first run until that
            one. ways: what a sentence calls the runs.
    """
    known = {each.place for each in windows[0]}
    own = [each for each in windows[1] if each.of_generator]
    if not own or own[0].kind != BEGINS or own[0].place in known:
        return ""
    when, first = _began(own[0], moments, rank)
    told = _held([each for each in first if each.of_generator], own, (f"in {ways[1]}", "there"))
    return f" An iterator is made anew in {ways[1]}. {_against(own[0], when, ways[0])}: {told}." if told else ""


def done_again(
    rests: tuple[Sequence[Statement], Sequence[Statement]],
    moments: Sequence[Moment],
    rank: int,
    ways: tuple[str, str],
) -> str:
    """What the second run did otherwise in the statements that it alone runs in an operation than the first run did in
    an earlier one, with a space in front; empty where that never ran them, or did the same.

    Args:
        rests: what both runs ran in the operation from where they part. moments, ways: as in `made_anew`.
    """
    back = next((each.place for each in rests[0] if each.file), None)
    own = _until(rests[1], back)
    if not own or own[0].kind != BEGINS:
        return ""
    when, first = _began(own[0], moments[:-1], rank)
    told = _held(_until(first, back), own, (f"in {ways[1]}", "there"))
    return f" {_against(own[0], when, ways[0])}: {told}." if told else ""


def _against(first: Statement, when: str, way: str) -> str:
    return f"Held against what {way} did from where {first.shown()} ran last before, in {when}"


def _until(row: Sequence[Statement], place: tuple[str, int, int] | None) -> list[Statement]:
    """What ran in the trainer's own files before a statement."""
    return list(takewhile(lambda each: each.place != place, (each for each in row if each.file)))


def _began(first: Statement, moments: Sequence[Moment], rank: int) -> tuple[str, Sequence[Statement]]:
    """The latest operation of a run in which a statement ran, in words, and what ran there from it on; both empty where
    it did in none. In the latest a run is nearest to where the other one is, as in its epoch."""
    for op, ran in reversed(moments):
        row = unpacked(ran[rank]) if rank in ran else ()
        at = next((at for at, each in enumerate(row) if each.place == first.place), None)
        if at is not None:
            return wording.at(op), row[at:]
    return "", ()


def _held(first: Sequence[Statement], own: Sequence[Statement], ways: tuple[str, str]) -> str:
    """What the statements of two iterators read and made otherwise, and the first that is another one."""
    told, names = list[str](), set[str]()
    for there, here in zip(first[:MOST_HELD], own[:MOST_HELD], strict=False):
        if there.place != here.place:
            goes = f"{ways[0]} it goes on with {here.shown()}, and {ways[1]} with {there.shown()}"
            return "; ".join([*told[:MOST_VALUES], goes])
        known = {each.path: each for each in there.values}
        for each in here.values if here.kind in (BEGINS, ENDS) else ():
            other = known.get(each.path)
            if other is None or not _apart(each, other) or last_word(each.path) in names:
                continue
            names.add(last_word(each.path))
            verb = "reads" if here.kind == BEGINS else "makes"
            both = f"which is {shown(each.text)} {ways[0]} and {shown(other.text)} {ways[1]}"
            told.append(f"{here.shown()} {verb} `{each.path}`, {both}")
    return "; ".join(told[:MOST_VALUES])


def _apart(one: Told, other: Told) -> bool:
    """Whether two plain values are not the same, and a sentence can say so."""
    return one.is_plain and not one.path.startswith(BEHIND) and shown(one.text) != shown(other.text)
