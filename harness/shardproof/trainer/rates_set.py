"""Which line set the learning rates that a step was made with, in two ways to compute the same.

*Verifies*: that no later line changed them before the step wrote parameters. *Does not verify*: rates of optimizers
that are none of torch's, or that no line of the trainer's names before the first operation is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardproof.trainer.lines import RATE, TOUCHES, Moment, unpacked


class _Set(NamedTuple):
    """That a statement set rates. rates: of all groups. told: the statement, and when it ran. at: the number of the
    operation."""

    rates: tuple[str, ...]
    told: str
    at: int


def rates_set(one: Sequence[Moment], other: Sequence[Moment], names: tuple[str, str]) -> tuple[str, int]:
    """A sentence on the lines that set the rates of a step last, where two ways have other ones, and the number of the
    earlier step among the operations in which one of them did; empty where they have the same, or not the same groups,
    or nobody knows, and -1 where none is a step's before this one.

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
    steps = [each.at for each in (mine, its) if one[0].op.kind != "step" and each.at < min(len(one), len(other)) - 1
             and one[each.at].op.kind == other[each.at].op.kind == "step"]  # fmt: skip
    return f"The learning rate{which} that this step was made with was set last {ways}.", max(steps, default=-1)


def _in_effect(moments: Sequence[Moment]) -> _Set | None:
    """What set the rates last, on the first rank, before the last operation wrote parameters."""
    found: _Set | None = None
    for at, (op, ran) in enumerate(moments):
        last = at == len(moments) - 1
        when = ("this step" if last else f"step {op.iteration}") if op.kind == "step" else f"`{op.kind}`"
        for statement in unpacked(ran[min(ran)]) if ran else ():
            touched = {told.path: told.text for told in statement.values} if statement.kind == TOUCHES else {}
            if last and statement.file and "parameters" in touched:
                break
            if RATE in touched:
                found = _Set(tuple(touched[RATE].split(", ")), f"{statement.shown()} in {when}", at)
    return found
