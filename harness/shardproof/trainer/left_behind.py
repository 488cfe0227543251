"""State that never moves while what it should follow does, as the buffers of a moving average that looks for parameters
alone.

*Verifies*: that a value is the same after every step, that one of the same last names and shape is not, and that others
beside the first move. *Does not verify*: that it should follow: an average may take parameters alone on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.trainer.every_mesh import Name, Values
from shardproof.trainer.rounding import FLOATS

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
    still = [name for name in names if name not in moves]
    found = {name: led for name in still if (led := _leader(name, moves, first)) is not None}
    behind = [name for name, led in found.items() if _follows(name, led, moves, first)]
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


def _leader(name: Name, moves: set[Name], values: Values) -> Name | None:
    """What moves, has as many elements, and shares most of the last words of a name."""

    def shared(other: Name) -> int:
        return _shared(name[1], other[1])

    same = [one for one in moves if values[one].shape == values[name].shape and values[one].dtype == values[name].dtype]
    best = max(same, key=shared, default=None)
    return best if best is not None and shared(best) >= LEAST_WORDS else None


def _follows(name: Name, led: Name, moves: set[Name], values: Values) -> bool:
    """Whether siblings of a value, of which the names begin as its own does, move with siblings of its leader."""
    words = _shared(name[1], led[1])
    mine, its = (one[1].split(".")[:-words] for one in (name, led))
    if mine == its or not mine:
        return False
    for one in moves:
        parts = one[1].split(".")
        if parts[: len(mine)] == mine:
            other = ".".join([*its, *parts[len(mine) :]])
            if any(each[1] == other for each in moves):
                return True
    return False


def _shared(one: str, other: str) -> int:
    """How many words two names share at their ends."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((at for at, (mine, its) in enumerate(pairs) if mine != its), min(one.count("."), other.count(".")) + 1)
