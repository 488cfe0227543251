"""Steps that a loss scaler skipped, seen from the state: the scale falls, and no parameter changes.

*Verifies*: both, of a scaler that was found. *Does not verify*: that a gradient was not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardproof.trainer.values.counted import plain_number
from shardproof.trainer.values.every_mesh import Name, Values

PARAM, SCALER, SCHEDULER = "param", "scaler", "scheduler"


class Skipped(NamedTuple):
    """A step that was skipped. scale: before and after it. schedule: whether a schedule moved on in it."""

    step: int
    scale: tuple[str, str]
    schedule: bool


def overflows(steps: Iterable[tuple[int, Values, Values]]) -> list[Skipped]:
    """The steps that were skipped, of steps that each come with a number and with all values before and after it."""
    found = list[Skipped]()
    for step, before, after in steps:
        scales = sorted(
            name for name in before.keys() & after.keys() if name[0] == SCALER and name[1].endswith("scale")
        )
        fell = next((pair for pair in (_scales(before, after, name) for name in scales) if pair), None)
        still = all(after.get(name) == value for name, value in before.items() if name[0] == PARAM)
        if fell and still:
            moved = any(name[0] == SCHEDULER and name[1].endswith("last_epoch") and after.get(name) != value
                        for name, value in before.items())  # fmt: skip
            found.append(Skipped(step, fell, moved))
    return found


def all_overflow(skipped: Sequence[Skipped], steps: int) -> str:
    """A sentence where every step was skipped; empty otherwise."""
    if not skipped or len(skipped) < steps:
        return ""
    return (
        f"Every step was skipped: the loss scale fell from {skipped[0].scale[0]} to {skipped[-1].scale[1]}. Begin with "
        "a smaller one, or give more steps, as in --program 'arms 8 4'"
    )


def _scales(before: Values, after: Values, name: Name) -> tuple[str, str] | None:
    """A loss scale before a step and after it, if it fell; None otherwise."""
    one, other = (plain_number(values, name).partition(" ")[2] for values in (before, after))
    return (one, other) if one and other and float(other) < float(one) else None
