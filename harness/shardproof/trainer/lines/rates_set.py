"""Which line set the learning rates that a step was made with, in two ways to compute the same.

*Verifies*: that no later line changed them before the step wrote parameters. *Does not verify*: rates of optimizers
that are none of torch's, or that no line of the trainer's names before the first operation is over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from shardproof.trainer.lines.nested import heads_of
from shardproof.trainer.lines.setters import with_values
from shardproof.trainer.lines.statements import RATE, TOUCHES, Moment, Touch, unpacked
from shardproof.trainer.values import wording
from shardproof.trainer.values.telling import times


class _Set(NamedTuple):
    """That a statement set rates. rates: of all groups. told: the statement, and when it ran. step: the number of the
    earlier step in which it did; -1 in any other operation, and in this step."""

    rates: tuple[str, ...]
    told: str
    step: int


def rates_set(one: Sequence[Moment], other: Sequence[Moment], names: tuple[str, str]) -> tuple[str, int]:
    """A sentence on the lines that set the rates of a step last, where two ways have other ones, and the number of the
    earlier step in which one of them did; empty where they have the same, or not the same groups, or nobody knows, and
    -1 where none is a step's before this one that both ways have run since their build.

    Args:
        one, other: the operations of both ways until the step, which is the last. names: such as `with schedule=alone`.
    """
    mine, its = (_in_effect(way) for way in (one, other))
    if mine is None or its is None or len(mine.rates) != len(its.rates) or mine.rates == its.rates:
        return "", -1
    group = next(number for number, pair in enumerate(zip(mine.rates, its.rates, strict=True)) if len({*pair}) > 1)
    which = f" of group {group}" if len(mine.rates) > 1 else ""
    ways = " and ".join(
        f"to {each.rates[group]} {name} by {each.told}" for each, name in zip((mine, its), names, strict=True)
    )
    begun = all(way[0].op.kind != "step" for way in (one, other))
    step = max(mine.step, its.step) if begun else -1
    return f"The learning rate{which} that this step was made with was set last {ways}.", step


def _in_effect(moments: Sequence[Moment]) -> _Set | None:
    """What set the rates last, on the first rank, before the last operation wrote parameters."""
    found: tuple[int, int, str] | None = None  # the operation, the statement there, and the rates
    for at, (_, ran) in enumerate(moments):
        for number, statement in enumerate(unpacked(ran[min(ran)]) if ran else ()):
            touched = {told.path: told.text for told in statement.values} if statement.kind == TOUCHES else {}
            if at == len(moments) - 1 and statement.file and "parameters" in touched:
                break
            if RATE in touched:
                found = at, number, touched[RATE]
    if found is None:
        return None
    at, number, rates = found
    (op, ran), last = moments[at], at == len(moments) - 1
    data = ran[min(ran)]
    when = "this step" if last and op.kind == "step" else wording.at(op)
    earlier = op.iteration if op.kind == "step" and not last else -1
    told = f"{unpacked(data)[number].shown()} in {when}{_behind(data, number)}"
    return _Set(tuple(rates.split(", ")), told, earlier)


def _behind(data: bytes, number: int) -> str:
    """The `if` that decided whether a statement ran, with what it read the last time before it, with a comma in front;
    empty where none did."""
    row = unpacked(data)
    own = row[number]
    heads = (head for head in heads_of(data).get((own.file, own.line), ()) if _DECIDES.match(head.text))
    head = next((each for head in heads for each in reversed(row[:number]) if each.place == head.place), None)
    return f", behind {with_values(head)}" if head else ""


_DECIDES = re.compile(r"(if|elif|while) ")


def sets_often(touch: Touch) -> str:
    """The end of a note on a line that sets the rate of one group several times in a step, to several numbers; empty of
    any other.

    Args:
        touch: what the line did in the step.
    """
    first = [each for each in touch.rated if each[0] == touch.rated[0][0]]
    if len(first) < 2 or len({new for _, _, new in first}) < 2:
        return ""
    old, new = _shown(first[0][1]), _shown(first[-1][2])
    return (
        f"{touch.place} sets the learning rate {times(len(first))}, from {old} to {new}: a schedule that is "
        "stepped for each micro-batch is over sooner than one that counts the optimizer's steps"
    )


def _shown(rate: str) -> str:
    try:
        return f"{float(rate):.6g}"
    except ValueError:
        return rate
