"""State that never moves while what it should follow does, as the buffers of a moving average that looks for parameters
alone.

*Verifies*: that a value is the same after every step, that one of the same last names and shape is not, and that others
beside the first move. *Does not verify*: that it should follow: an average may take parameters alone on purpose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardproof.trainer.values.every_mesh import Name, Values
from shardproof.trainer.values.rounding import FLOATS

LEAST_STEPS = 2
LEAST_WORDS = 2
"""Of two names, how many words have to be the same at the end."""

MOST_NAMES = 3

_ROLES = ("param", "buffer", "extra_state")


def left_behind(moments: Sequence[Values]) -> str:
    """A note on it; empty where there is none.

    Args:
        moments: the state after `build` and after each step.
    """
    if len(moments) <= LEAST_STEPS:
        return ""
    first = moments[0]
    names = [name for name, value in first.items() if name[0] in _ROLES and value.dtype in FLOATS and value.data]
    moves = {name for name in names if any(each.get(name) != first[name] for each in moments)}
    by_end: dict[str, list[Name]] = {}
    for name in moves:
        by_end.setdefault(_end(name), []).append(name)
    found = {name: led for name in names if name not in moves
             and (led := _leader(name, by_end.get(_end(name), ()), first)) is not None}  # fmt: skip
    moving = {name[1] for name in moves}
    behind = [name for name, led in found.items() if _follows(name, led, moving)]
    if not behind:
        return ""
    more = f" and {len(behind) - MOST_NAMES} more" if len(behind) > MOST_NAMES else ""
    names_of = ", ".join(name[1] for name in behind[:MOST_NAMES]) + more
    leaders = ", ".join(found[name][1] for name in behind[:MOST_NAMES])
    many = len(behind) > 1
    verbs = ("never move", "do", "them") if many else ("never moves", "does", "it")
    return (
        f"{names_of} {verbs[0]}, while {leaders} {verbs[1]}, and others beside {verbs[2]} follow theirs: look at what "
        "is carried over, and at the names under which it is looked for"
    )


def _end(name: Name) -> str:
    """The last words of a name that another one has to have, too."""
    return ".".join(name[1].split(".")[-LEAST_WORDS:])


def _leader(name: Name, moves: Sequence[Name], values: Values) -> Name | None:
    """Of what moves and ends alike, what has as many elements and shares most of the last words of a name."""
    same = [one for one in moves if values[one].shape == values[name].shape and values[one].dtype == values[name].dtype]
    return max(same, key=lambda one: (_shared(name[1], one[1]), one), default=None)


def _follows(name: Name, led: Name, moving: Collection[str]) -> bool:
    """Whether siblings of a value, of which the names begin as its own does, move with siblings of its leader."""
    words = _shared(name[1], led[1])
    mine, its = (".".join(one[1].split(".")[:-words]) for one in (name, led))
    siblings = (one.removeprefix(f"{mine}.") for one in moving if mine and one.startswith(f"{mine}."))
    return mine != its and any(f"{its}.{rest}" in moving or (not its and rest in moving) for rest in siblings)


def _shared(one: str, other: str) -> int:
    """How many words two names share at their ends."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((at for at, (mine, its) in enumerate(pairs) if mine != its), min(one.count("."), other.count(".")) + 1)
