"""A note on exceptions that a step raises and catches (`shardproof.trainer.rank.raised`)."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.trainer.lines.statements import Moment, caught_in
from shardproof.trainer.values.wording import at


def caught(moments: Sequence[Moment]) -> str:
    """A note on the first statement of a step, on the first rank, that raises while the step goes on; empty where none
    does.

    Args:
        moments: the steps of a run.
    """
    every = [(moment, each) for moment in moments if moment.ran for each in caught_in(moment.ran[min(moment.ran)])]
    if not every:
        return ""
    moment, (statement, error, following) = every[0]
    steps = [other for other, each in every if each[0].shown() == statement.shown()]
    often = f"{at(moment.op)}{f' and {len(steps) - 1} more' * (len(steps) > 1)}"
    return (
        f"{statement.shown()} raises {error} in {often}, which is caught, and {following.shown()} comes next: what "
        "should have come in between is left out, and what sets something back there, as a hook behind a forward does, "
        "is safe in a `finally` or a `with` alone"
    )
