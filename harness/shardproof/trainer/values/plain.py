"""Which plain numbers on a trainer no load brings back, by what rank 0 had after each operation.

A metric, a best score or a count of samples is often a plain attribute, which no arm compares, since most of these are
none of a checkpoint's business. What looks like one that is: the steps made it, every run makes it alike, and the
resumed run has it otherwise, after the load and after a step too.

*Verifies*: those four. *Does not verify*: that anything ever reads the number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from shardproof.observe.record import Record
from shardproof.trainer.arms import PLAIN

Numbers = Mapping[str, str]
"""Name → number, as its text."""

SKIPPED = "skip"
"""What is in the name of a count of steps that were not taken, such as DeepSpeed's `skipped_steps`."""


def numbers_by_op(records: Iterable[Record]) -> dict[int, Numbers]:
    """Operation → the plain numbers after it, on rank 0."""
    return {record.op: json.loads(record.data) for record in records if record.role == PLAIN and record.rank == 0}


def left_behind(
    fresh: Numbers, saved: Numbers, again: Numbers, loaded: Numbers, steps: Iterable[tuple[Numbers, Numbers]]
) -> list[str]:
    """The names of numbers that no load brings back.

    Args:
        fresh, saved, again: after the build, at the save, and at the save of a second run. loaded: after the load.
        steps: after each step that both have, of the run without a break and of the resumed one.
    """
    made = [name for name, number in saved.items() if number not in (fresh.get(name), loaded.get(name))]
    later = list(steps)
    return [name for name in made if again.get(name) == saved[name] and later
            and all(one.get(name) != other.get(name) for one, other in later)]  # fmt: skip


def numbers_left_behind(names: Iterable[str]) -> str:
    """What is not compared, though it may be state."""
    few = sorted(names)
    told = ", ".join(few[:4]) + (f" and {len(few) - 4} more" if len(few) > 4 else "")
    return (
        f"not compared, since a plain number may be anything: {told}; the resumed run has not what the other run has, "
        "and if that is state, such as a metric or a best score, give it in `state()`"
    )


def every_step_skipped(fresh: Numbers, last: Numbers, steps: int) -> str:
    """A sentence on a count of skipped steps that went up by as many as there were; empty where none did.

    Args:
        fresh, last: after the build, and after the last of the steps.
    """
    for name, number in sorted(last.items()):
        begun = fresh.get(name, "")
        counts = SKIPPED in name.lower() and number.isdecimal() and begun.isdecimal()
        if counts and steps and int(number) - int(begun) == steps:
            return (
                f"Every step was skipped: {name} went up by {steps}. Look at the loss scale, and at gradients that are "
                "not finite"
            )
    return ""


def counted_apart(numbers: Sequence[Numbers], updates: int) -> str:
    """A note on a count of steps, by its name, that grows by another number in each step than the optimizer counts
    updates in it; empty where there is none.

    Args:
        numbers: after the build and after each step. updates: how many the optimizer counts in each step.
    """
    for name in sorted(numbers[0]) if len(numbers) > 2 and updates > 0 else ():
        texts = [one.get(name, "") for one in numbers]
        if _COUNT.fullmatch(name.rpartition(".")[2]) and all(text.isdecimal() for text in texts):
            grown = {int(after) - int(before) for before, after in pairwise(texts)}
            if len(grown) == 1 and grown.isdisjoint({0, updates}):
                return (
                    f"{name} grows by {grown.pop()} in each step, in which the optimizer makes {updates} "
                    f"update{'s' * (updates > 1)}: a schedule, a save or an end that goes by it comes at another time"
                )
    return ""


_COUNT = re.compile(r"(global|optimizer|opt|num|total)?_?(steps?|updates?)(_count|_num)?")
