"""What collectives say of a difference: two ways that reduce a tensor another number of times, and a parameter that the
ranks step apart, of which they have reduced nothing.

*Verifies*: how often each rank took part in which collective of a step (`shardproof.trainer.rank.collectives`).
*Does not verify*: which tensor it was. A reduction is told by how many numbers it carries, and a bucket, or a flat
buffer, carries several tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardproof.observe.record import Record
from shardproof.readers.values import STORAGE_DTYPE
from shardproof.trainer.arms import COLLECTIVES
from shardproof.trainer.values.telling import times

Collective = tuple[str, int, tuple[int, ...]]
"""Kind, such as `all_reduce`; how many numbers a rank puts in; among which ranks."""


class Seen(NamedTuple):
    """How often a rank took part in a collective, a line from which it did, and the dtype of the numbers."""

    often: int
    line: str
    dtype: str


OfRank = Mapping[Collective, Seen]

MOST_APART = 1
"""Two ways with more reductions than that which only one of them has are built otherwise, and nothing is told."""

MOST_TOLD = 3

NEVER = Seen(0, "", "")


def collectives_by_op(records: Iterable[Record]) -> dict[int, dict[int, OfRank]]:
    """Operation → rank → its collectives."""
    found: dict[int, dict[int, OfRank]] = {}
    for record in records:
        if record.role != COLLECTIVES:
            continue
        own: dict[Collective, Seen] = {}
        for kind, numbers, ranks, where, dtype, count in json.loads(record.data):
            key = kind, numbers, tuple(ranks)
            known = own.get(key, NEVER)
            own[key] = Seen(known.often + count, known.line or where, dtype)
        found.setdefault(record.op, {})[record.rank] = own
    return found


def reductions_apart(one: Mapping[int, OfRank], other: Mapping[int, OfRank], names: tuple[str, str]) -> str:
    """A sentence about the reductions of a step that a rank takes part in more often in one of two ways; empty where
    there are none, or where the ways are built otherwise.

    Args:
        one, other: rank → its collectives in the step. names: of the ways.
    """
    for rank in sorted(one.keys() & other.keys()):
        mine, its = (_reductions(way[rank]) for way in (one, other))
        apart = [key for key in {**mine, **its} if mine.get(key, NEVER).often != its.get(key, NEVER).often]
        if apart and len(mine.keys() ^ its.keys()) <= MOST_APART:
            told = [
                f"{_called(key)} {times(mine.get(key, NEVER).often)} with {names[0]} and "
                f"{times(its.get(key, NEVER).often)} with {names[1]}{_from(its.get(key, mine.get(key, NEVER)).line)}"
                for key in apart[:MOST_TOLD]
            ]
            more = any(key in mine and key in its and len(key[2]) > 1 for key in apart)
            return f"Rank {rank} takes part in {', in '.join(told)}.{AGAIN if more else ''}"
    return ""


AGAIN = (
    " A sum that has been reduced counts once more for each rank wherever it is reduced again with what is added to it."
)


def not_reduced(numbers: int, ranks: Mapping[int, OfRank]) -> str:
    """A sentence about what was reduced in a step after which ranks have other bits of a parameter; empty where
    something was that may have been its gradient.

    Args:
        numbers: how many the parameter has. ranks: rank → its collectives in the step; empty where they are not known.
    """
    if len(ranks) < 2:
        return ""
    lines = {key: seen.line for own in ranks.values() for key, seen in _reductions(own).items()}
    whole = [key for key in lines if key[1] >= numbers and len(key[2]) == len(ranks)]
    if whole:
        return ""
    if not lines:
        return "In this step nothing is reduced over ranks at all."
    part = [key for key in lines if key[1] >= numbers]
    told = ", ".join(f"{_called(key)}{_from(lines[key])}" for key in (part or list(lines))[:MOST_TOLD])
    if part:
        return f"What is reduced in this step with {numbers} numbers or more, is so among some ranks alone: {told}."
    return f"Nothing of {numbers} numbers or more is reduced in this step; reduced are {told}."


def reduced(own: OfRank) -> str:
    """What a rank reduces in a step, in a few words; empty where it is nothing."""
    return _told(_reductions(own))


def gathered(own: OfRank) -> str:
    """What a rank gathers from others in a step, in a few words; empty where it is nothing."""
    return _told({key: seen for key, seen in own.items() if "gather" in key[0]})


def _told(found: OfRank) -> str:
    told = [
        f"{_called(key)} in {STORAGE_DTYPE.get(f'{seen.dtype}Storage', seen.dtype)}, {times(seen.often)}"
        for key, seen in found.items()
    ]
    more = [f"and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else []
    return "; ".join([*told[:MOST_TOLD], *more])


def _reductions(own: OfRank) -> OfRank:
    return {key: value for key, value in own.items() if "reduce" in key[0]}


def _called(key: Collective) -> str:
    kind, numbers, ranks = key
    among = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]} alone" if ranks else "ranks"
    return f"{kind} of {numbers} number{'s' * (numbers != 1)} among {among}"


def _from(line: str) -> str:
    return f" ({line})" if line else ""
