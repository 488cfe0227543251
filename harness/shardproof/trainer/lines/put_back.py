"""Sentences on statements that write an old copy of a parameter back (`shardproof.trainer.rank.put_back`)."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.trainer.lines.statements import Moment, touched
from shardproof.trainer.values.wording import at


def put_back(moments: Sequence[Moment]) -> str:
    """A note on the first statement of a step, on the first rank, that writes what parameters were before the updates
    of an earlier step; empty where there is none.

    Args:
        moments: the operations of a run, in order.
    """
    known = {each.op.index: f"after {at(each.op)}" for each in moments}
    for moment in moments:
        if moment.op.kind != "step" or not moment.ran:
            continue
        for touch in touched(moment.ran[min(moment.ran)]):
            ago = {known[op] for op in touch.back.values() if op in known}
            if len(ago) == 1:
                names = sorted(touch.back)
                few = f"{', '.join(names[:2])}{f' and {len(names) - 2} more' * (len(names) > 2)}"
                of_them = f"into {len(names)} parameter{'s' * (len(names) > 1)} ({few})"
                return (
                    f"{touch.place} writes {of_them} in {at(moment.op)} what was there {ago.pop()}, and gone since: "
                    "unless a copy that old is meant, look at when it is taken, and at what should renew it"
                )
    return ""
