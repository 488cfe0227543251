"""Where ranks wait that do not come to an end: the call of a library, and the user's own line that led there.

Ranks that wait in one collective have lost a rank, or a message. Ranks that wait in different ones never meet: one
group of them has entered a collective that the others never enter, which is what most hangs come from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shardproof.observe.stacks import Wait, told_ranks, waits_in
from shardproof.result import Failure

APART = (
    "They are in different collectives, so that they never meet: some ranks have entered one that the others never "
    "enter, or enter in another order."
)
ALONE = "Ranks that are in a collective wait for those that are not, and never enter it."

_COLLECTIVES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives|nn/functional)\.py$")
_PASSES_ON = re.compile(
    r"/torch/distributed/c10d_logger\.py$|/torch/utils/_contextlib\.py$|/torch/_ops\.py$|/shardproof/emulation/"
    r"|/lib/python\d[.\d]*/(?!site-packages/)|^<"
)
"""Files of frames that stand between a caller and what it calls, and say nothing by themselves."""


@dataclass(frozen=True)
class _Place:
    """Where ranks stood. call: the collective's name, empty outside of one. function, at: of the innermost frame that
    tells. by: the user's own line above it, where it is another one."""

    ranks: tuple[int, ...]
    call: str
    function: str
    at: str
    by: str


def told_waits(error: Failure, own_file: str = "") -> str:
    """Sentences on where ranks wait, for a deadline; empty where the stacks do not say.

    Args:
        own_file: the user's own file, whose innermost line is named beside the library's.
    """
    places = _places(error, own_file)
    if not places:
        return ""
    told = [_told(place, first=place is places[0] or not places[0].call) for place in places]
    text = f"{told[0][0].upper()}{told[0][1:]}{''.join(f', {one}' for one in told[1:])}."
    return " ".join(filter(None, [text, _why(places)]))


def are_apart(error: Failure) -> bool:
    """Whether ranks of a deadline are known to stand at different places."""
    return len(_places(error)) > 1


def _why(places: list[_Place]) -> str:
    """Why ranks that stand at different places wait for ever; empty where all stand at one, or in no collective."""
    if len(places) < 2:
        return ""
    if all(place.call for place in places):
        return APART
    return ALONE if any(place.call for place in places) else ""


def _places(error: Failure, own_file: str = "") -> list[_Place]:
    """Groups of ranks by where they stood, however they came there; the group of the lowest rank first."""
    alike: dict[tuple[str, str], _Place] = {}
    for place in (_place(wait, own_file) for wait in waits_in(error.traceback)):
        known = alike.get((place.call, place.at))
        ranks = tuple(sorted({*(known.ranks if known else ()), *place.ranks}))
        alike[place.call, place.at] = replace(place, ranks=ranks)
    return sorted(alike.values(), key=lambda place: place.ranks)


def _place(wait: Wait, own_file: str) -> _Place:
    """The outermost function of torch's collectives on top of the stack, with its caller."""
    call, caller = "", None
    for frame in wait.frames:
        if _COLLECTIVES.search(frame.file):
            call = frame.function
        elif not _PASSES_ON.search(frame.file):
            caller = frame
            break
    caller = caller or wait.frames[0]
    own = next((frame for frame in wait.frames if frame.file == own_file), None)
    file = caller.file.rpartition("/")[2] if caller == own else "/".join(caller.file.split("/")[-2:])
    by = f", called from {own.file.rpartition('/')[2]}, line {own.line}" if own and own != caller else ""
    return _Place(wait.ranks, call, caller.function, f"{file}, line {caller.line}", by)


def _told(place: _Place, *, first: bool) -> str:
    several = len(place.ranks) > 1
    who, where = told_ranks(place.ranks), f"({place.at}{place.by})"
    if place.call:
        return f"{who} {('wait ' if several else 'waits ') if first else ''}in {place.call} {where}"
    return f"{who} {'are' if several else 'is'} in {place.function} {where}"
