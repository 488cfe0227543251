"""Parameters that have several names in the one of two ways to compute the same, and not in the other; and whether it
is those with several names that two ways differ in."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from shardproof.observe.record import Record
from shardproof.trainer.arms import SHARED

Names = frozenset[str]
"""All names of one parameter."""


def shared_by_op(records: Iterable[Record]) -> dict[int, set[Names]]:
    """Operation → the names of each parameter that has several on some rank."""
    found: dict[int, set[Names]] = {}
    for record in records:
        if record.role == SHARED:
            found.setdefault(record.op, set()).update(frozenset(names) for names in json.loads(record.data))
    return found


def tied_in_one(ways: Sequence[Collection[Names]], names: tuple[str, str], there: Collection[str]) -> str:
    """A sentence about the first parameter that only one of two ways has as one; empty where there is none.

    Args:
        ways: what parameters have several names in each. names: of the ways. there: the parameters that both have.
    """
    for (own, other), (here, elsewhere) in zip((ways, ways[::-1]), (names, names[::-1]), strict=True):
        for every in sorted(map(sorted, own)):
            if {*every} <= {*there} and not any({*every} <= known for known in other):
                return (
                    f"{' and '.join(every)} are one parameter with {here}, and with {elsewhere} they are not: each is "
                    "stepped there with its own part of the gradient."
                )
    return ""


def differs_where_shared(wrong: Collection[str], every: Collection[str], shared: Collection[Names]) -> str:
    """A sentence, if those parameters differ that have several names, and no other does."""
    several = {name for names in shared for name in names}
    if not several or {*wrong} != several & {*every} or {*every} <= several:
        return ""
    return (
        "The parameters that differ are those that have more than one name, so that a forward uses each of them more "
        "than once, and no other parameter differs: look at how the parts of such a gradient are added up."
    )
