"""Where the numbers that a step was given come in the run without a break, though none of its rows does, as of texts
that are packed into rows of one length.

*Verifies*: that the numbers are the same, one after the other. *Does not verify*: that no others between them are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from shardproof.observe.record import Record
from shardproof.trainer.data.given import of_each_call

LEAST = 6
"""How many numbers have to be the same."""

LEAST_KINDS = 4
"""How many of these have to be different ones, so that they are no filling."""

_PLACE = 9


def numbers_given_by_op(records: Iterable[Record]) -> dict[int, dict[int, list[int]]]:
    """Operation → rank → the whole numbers that its models were given, in order; empty of other data."""
    return of_each_call(records, _PLACE)


def cut_elsewhere(own: Sequence[int], step: int, steps: Mapping[int, Sequence[int]]) -> str:
    """A sentence on what a step begins with, where that comes at one other place of the run without a break.

    Args:
        own: what the step was given. steps: step → what that run was given in it.
    """
    order = sorted(steps)
    stream = [number for each in order for number in steps[each]]
    begins = dict(zip(order, accumulate((len(steps[each]) for each in order), initial=0), strict=False))
    first = [*own[:LEAST]]
    places = [at for at in range(len(stream) - LEAST + 1) if stream[at : at + LEAST] == first]
    if len({*first}) < LEAST_KINDS or len(places) != 1 or step not in begins or places[0] == begins[step]:
        return ""
    same = [one == other for one, other in zip(own, stream[places[0] :], strict=False)]
    if [*same, False].index(False) < len(same) / 2:  # windows of one text may overlap by chance
        return ""
    there = next(each for each in reversed(order) if begins[each] <= places[0])
    off = places[0] - begins[step]
    late = f"{abs(off)} numbers too {'early' if off < 0 else 'late'}"
    return (
        f"Its numbers come in that run too, cut into other rows: it begins with what step {there} had from its number "
        f"{places[0] - begins[there] + 1} on, {late}."
    )
