"""Which stage of a save each rank is in: what lies between two collectives, in which no rank waits for another.

A rank that begins a stage asks for a file of a name that begins with `MARK`, which is not there and which strace
records with the rank's other calls. Two kinds of names may follow:

* a number: the stage itself, from a writer that knows its stages (`rank.torch_stacks.Writer`).
* `0.1.2-5`: the collective that the rank has just made, the fifth of the group of ranks 0, 1 and 2. `stages_of` makes
  numbers of these by Lamport's rule ("Time, clocks, and the ordering of events in a distributed system", 1978): a
  collective comes one stage after the latest stage in which any of its ranks was.

So whatever one rank did before a message to another one has a smaller number than what the other did after it. To order
changes by stage and then by rank is therefore one way in which they could have happened, however the groups overlap.

*Does not see*: what ranks tell each other by other means than collectives, such as sends, a store, or files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MARK = ".shardproof-stage-"

_COLLECTIVE = re.compile(r"(\d+(?:\.\d+)*)-\d+")


def name_of(group: Sequence[int], number: int) -> str:
    """The name by which a rank says that it has made a collective, the how manieth of a group."""
    return f"{MARK}{'.'.join(map(str, sorted(group)))}-{number}"


def stages_of(marks: Mapping[int, Sequence[str]]) -> dict[int, list[int]]:
    """Of each rank the stage that each of its marks begins, in order.

    Args:
        marks: rank → what stands behind `MARK` in the names that it asked for.
    """
    now, found = dict.fromkeys(marks, 0), {rank: list[int]() for rank in marks}
    waiting = {rank: list(reversed(names)) for rank, names in marks.items() if names}
    while waiting:
        first = next((rank for rank in waiting if _together(waiting, waiting[rank][-1])), next(iter(waiting)))
        name = waiting[first][-1]
        members = [rank for rank in _members(name) if waiting.get(rank, [""])[-1] == name] or [first]
        stage = int(name) if name.isdigit() else 1 + max(now[rank] for rank in members)
        for rank in members:
            waiting[rank].pop()
            found[rank].append(stage)
            now[rank] = stage
            if not waiting[rank]:
                del waiting[rank]
    return found


def _members(name: str) -> list[int]:
    found = _COLLECTIVE.fullmatch(name)
    return [int(rank) for rank in found[1].split(".")] if found else []


def _together(waiting: Mapping[int, Sequence[str]], name: str) -> bool:
    """Whether every rank of a collective has come to it, or never will since it was killed before."""
    return all(waiting[rank][-1] == name for rank in _members(name) if name in waiting.get(rank, ()))
