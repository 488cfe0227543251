"""Statements that a backward runs again in one way of two, as a checkpoint of activations computes the forward anew:
what they count or add to, they count twice.

*Verifies*: that the statement ran inside of another one that calls `backward`. *Does not verify*: who called it there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardproof.trainer.lines.nested import Within, within
from shardproof.trainer.lines.statements import BEGINS, OfRanks, Statement, unpacked
from shardproof.trainer.values.telling import times

_BACKWARD = re.compile(r"\bbackward\(|\bautograd\.grad\(")


def run_again(ways: Sequence[OfRanks], places: Sequence[tuple[str, int]], names: Sequence[str]) -> str:
    """A sentence on a statement that runs inside of a backward more often in one way than in the other, with a space in
    front; empty where it does not.

    Args:
        ways: what ran in both ways. places: file and line of the statement in each. names: such as `with recompute=on`.
    """
    found = [_inside(way, place) for way, place in zip(ways, places, strict=True)]
    often = [len(heads) for heads, _ in found]
    if often[0] == often[1]:
        return ""
    more = often.index(max(often))
    head, (_, every) = found[more][0][0], found[more]
    other = f", and {times(min(often), 'never')} {names[1 - more]}" if min(often) else ""
    return (
        f" Of the {every} times that it runs {names[more]}, it runs {times(max(often))} inside of {head.shown()}, as "
        f"where a backward computes a forward again{other}: what it adds to counts that once more."
    )


def _inside(ran: OfRanks, place: tuple[str, int]) -> tuple[list[Statement], int]:
    """The statements that call a backward inside of which a statement ran on the first rank, each time; and how often
    it ran in all."""
    if not ran:
        return [], 0
    data = ran[min(ran)]
    row, where, heads, every = unpacked(data), within(data), list[Statement](), 0
    own = _functions_of_ones_own(row, where)
    for at, statement in enumerate(row):
        if statement.place != (*place, BEGINS):
            continue
        every += 1
        caller = where[at].caller
        while caller >= 0 and (caller in own or not _BACKWARD.search(row[caller].text)):
            caller = where[caller].caller
        heads += [row[caller]] if caller >= 0 else []
    return heads, every


def _functions_of_ones_own(row: Sequence[Statement], where: Sequence[Within]) -> set[int]:
    """The calls of a `backward` that is the trainer's own function, since it calls one in turn."""
    found = set[int]()
    for at, statement in enumerate(row):
        if statement.kind == BEGINS and _BACKWARD.search(statement.text):
            caller = where[at].caller
            while caller >= 0 and caller not in found:
                found.add(caller)
                caller = where[caller].caller
    return found
