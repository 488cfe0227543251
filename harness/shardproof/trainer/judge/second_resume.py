"""The arm `second resume`: a run that loads what a resumed run has saved.

A resumed run may go on rightly and still save something else than the run without a break does, such as a position in
the data that it counts from its own start. Only who loads that finds out.

*Verifies*: the state after the load, and after each step, against that of the first resume. *Does not verify*: a third
resume.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.diff import Difference
from shardproof.trainer.arms import RESUMED, SECOND_RESUME, STOPPED, WHOLE
from shardproof.trainer.judge.harmless import beside_random_states, harmless
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.judge.line_by_line import line_by_line
from shardproof.trainer.judge.waiting import waiting_at
from shardproof.trainer.judge.whose_data import data_of
from shardproof.trainer.values.telling import paragraphs
from shardproof.trainer.values.wording import differ, first_in_a_step
from shardproof.verdict import Verdict


def resumed_again(judging: Judging) -> None:
    """Judge it, where the first resume is right."""
    second, stopped, resumed = map(judging.named, (SECOND_RESUME, STOPPED, RESUMED))
    if second is None or resumed is None or {WHOLE, RESUMED} & judging.failures.keys():
        return
    if (stopped and judging.ended(stopped)) or judging.ended(second):
        return
    if any(arm.name == RESUMED and arm.verdict == Verdict.MISMATCH.value for arm in judging.found):
        return  # the second could only say it again
    load, found = judging.loaded(second), list[Difference]()
    later = next(op.iteration for op in second.ops if op.kind == "step")
    saved = judging.step(resumed, later - 1)
    left, notes = harmless(judging, second, resumed, saved)
    left |= judging.without_effect
    if load >= 0:
        free = judging.idle | judging.seeded_anew | judging.transient | left
        found = judging.compare(judging.at(saved), judging.at(load), load, free)
    # against the first resume, which is right: on three ranks and more its sums have another order than the whole run's
    found = found or judging.steps_differ(second, resumed, judging.idle | left, rounds=True)
    found, more = beside_random_states(judging, second, resumed, found, judging.idle | left)
    data = data_of(judging, second, found)
    if data:
        judging.between = None  # what a step made of them is no mechanism
    waits = waiting_at(judging, stopped or resumed, saved) if found else ""
    lines = line_by_line(judging, second, resumed, found, ("the first resume", "the second"))
    told = paragraphs(" ".join(filter(None, (waits, _sentence(found, later, data)))), lines)
    found, told = judging.with_its_end(second, found, told)
    judging.add(SECOND_RESUME, found, told, [*notes, *more])


def _sentence(found: Sequence[Difference], updates: int, data: str) -> str:
    """What the run has lost that is resumed twice.

    Args:
        updates: how many there were until the resumed run saved. data: which other data a step was given.
    """
    if not found:
        return ""
    return (
        f"A run that is resumed once goes on rightly, and one that loads what it saved after {updates} updates does "
        f"not: {differ(found)} from the first resume. {data or first_in_a_step(found)} Look at what a resumed "
        "run counts from its own start."
    )
