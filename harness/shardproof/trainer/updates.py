"""How often each of two ways to compute the same updated in one step, where they did not do so equally often.

One step of a trainer may be an epoch, or a batch that is cut into micro-batches. A way that drops the last ones, or
updates once more for them, comes to other values everywhere; that it counts another number of updates says why.

*Verifies*: by how much the optimizer's counts of steps, or else a schedule's, grew in the step. *Does not verify*: an
optimizer that counts nothing, beside no schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardproof.diff import as_numbers
from shardproof.trainer.every_mesh import Name, Values, of_every_mesh

Way = tuple[Values, Values]
"""What a way has before a step and after it."""

_NUMBER = re.compile(rb"(?:int|float) (\d+)(?:\.0)?")

_OF_SCHEDULE = re.compile(r"(.*\.)?_step_count")
"""Other than `last_epoch`, it does not begin again where a schedule does."""


def how_often(first: Way, own: Way, names: tuple[str, str], step: int) -> str:
    """A sentence; empty where both count as many updates, or none. names: of the two ways, such as `shard=no`."""
    (before, after), (before_too, after_too) = ([of_every_mesh(values)[0] for values in way] for way in (first, own))
    for kind, verb in (("step", "updated parameters"), ("scheduler", "moved its learning-rate schedule on")):
        grown = dict(_grown(kind, before, after)), dict(_grown(kind, before_too, after_too))
        pairs = {(grown[0][name], grown[1][name]) for name in grown[0].keys() & grown[1].keys()}
        if apart := sorted(pair for pair in pairs if pair[0] != pair[1] and min(pair) >= 0):
            one, other = apart[0]
            return f"At step {step}, {names[0]} {verb} {_times(one)} and {names[1]} {_times(other)}."
        if pairs:
            return ""
    return ""


def _grown(kind: str, before: Values, after: Values) -> Iterator[tuple[Name, int]]:
    """By how much each count grew. A count of the optimizer's that is not there yet is zero."""
    for name in after:
        if name[0] == kind and (kind == "step" or _OF_SCHEDULE.fullmatch(name[1])):
            start, end = _count(before, name), _count(after, name)
            start = 0 if start is None and kind == "step" else start
            if start is not None and end is not None:
                yield name, end - start


def _count(values: Values, name: Name) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if value.dtype == "utf8":
        number = _NUMBER.fullmatch(value.data)
        return int(number[1]) if number else None
    numbers = as_numbers(value).reshape(-1)
    return int(numbers[0]) if len(numbers) == 1 and numbers[0] == int(numbers[0]) else None


def _times(number: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(number, f"{number} times")
