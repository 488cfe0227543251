"""Gradients that wait for a step when a run saves, as inside of an accumulation: no checkpoint has them, unless a
trainer puts them there.

*Verifies*: that a parameter has a gradient other than zero with which no optimizer has stepped. *Does not verify*: that
the trainer means to save there.
"""

from __future__ import annotations

from shardproof.trainer.arms import Session
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.values.telling import one_or_many


def waiting_at(judging: Judging, session: Session, op: int) -> str:
    """A sentence on gradients that wait when a session saves; empty where none does.

    Args:
        session: which saves. op: its save, or the step before it.
    """
    if judging.trainer.fits:  # what came behind the last update, before the checkpoint was written
        ranks = judging.measured.get(session.ops[0].index, {})
    else:
        measured = [each.index for each in session.ops if each.index <= op and judging.measured.get(each.index)]
        ranks = judging.measured[measured[-1]] if measured else {}
    names = sorted({name for step in ranks.values() for name in step.waiting})
    if not names:
        return ""
    has = "has" if len(names) == 1 else "have"
    return (
        f"When the run saves, {one_or_many(names)} {has} a gradient that no optimizer has stepped with yet, as inside "
        "of an accumulation, and after the load there is none: what the resumed run steps with next lacks it. A "
        "trainer that never saves there needs `steps` that lead to a place where it does."
    )
