"""Cells that are run once more with more steps, since what a learning-rate schedule does later is not seen in a few:
the end of a warm-up, a milestone, a restart.

*Verifies*: nothing by itself; the arms of the longer run do. *Does not verify*: what a schedule does behind the last
step of the longer run, or where the longer run cannot be made, of which a sentence tells how it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardproof.program import ARMS, FIT
from shardproof.result import ALIKE, ArmResult, Result
from shardproof.scenario import Scenario
from shardproof.trainer.arms import RESUMED, TOO_SELDOM, TRAINS, WHOLE
from shardproof.trainer.cells import values_of
from shardproof.trainer.data.epochs import later_program
from shardproof.trainer.described import Described
from shardproof.trainer.values.notes import AS_NAN
from shardproof.verdict import Verdict

LEAST, AFTER = 16, 4
"""How many steps a longer run has at least before its save, and how many after it."""

MOST_LONGER = 3
"""How many cells are run once more with more steps."""

ENDED = (Verdict.CRASH.value, Verdict.HANG.value)


def longer_program(trainer: Described) -> str:
    """The program of a longer run, whose save comes after a multiple of the trainer's own steps before it; empty where
    the trainer's own steps are as many, where a longer run has nothing to compare, or for a trainer with `fit`, whose
    loop may know its own end and do something there."""
    before, after = trainer.steps
    saves = trainer.saves and after > 0
    kinds = [*([RESUMED] if saves else []), *([ALIKE] if trainer.alike else [])]
    if before + after >= LEAST or not kinds or trainer.fits:
        return ""
    return " ".join((ARMS, str(-(-LEAST // before) * before), str(AFTER if saves else 0), *kinds))


def longer(trainer: Described, results: Sequence[Result]) -> list[Scenario]:
    """The cells that are run once more: those that pass and of which a note proposes a longer program. The first one
    comes first, then those that are at another value of a single axis of `alike`, then others in order."""
    found = list[tuple[bool, Scenario]]()
    for place, result in enumerate(results):
        notes = (note for arm in result.arms if arm.name == TRAINS for note in arm.notes)
        program = later_program(notes) if result.verdict is Verdict.PASS else ""
        if program and (RESUMED in program.split() or _has_another_way(trainer, result)):
            axes = [word.partition("=")[0] for word in result.scenario.options]
            one_way = len(axes) == 1 and axes[0] in trainer.alike
            found.append((bool(place) and not one_way, replace(result.scenario, program=program)))
    return [scenario for _, scenario in sorted(found, key=lambda each: each[0])][:MOST_LONGER]


def _has_another_way(trainer: Described, result: Result) -> bool:
    """Whether a cell is held against another way that computes the same."""
    values = values_of(trainer, result.scenario)
    return any(values[axis] != trainer.axes[axis][0] for axis in trainer.alike)


def cut_short(result: Result, *, data: bool = False) -> str:
    """How a longer run ended that could not be made, or in which nothing could be seen; empty where it was made. A
    schedule or the data may end, the rate may come to zero, and numbers may grow out of bounds, all of which is no
    mistake of the trainer's.

    Args:
        data: whether the run is there for a later epoch, in which any other crash is one: the data alone may end.
    """
    failing = [arm for arm in result.arms if arm.verdict not in (Verdict.PASS.value, Verdict.UNSUPPORTED.value)]
    if result.verdict is Verdict.PASS or not all(_is_its_end(arm, result) for arm in failing):
        return ""
    told = failing[0].paragraphs[0] if failing and failing[0].sentence else result.reason
    if data and not told.startswith(StopIteration.__name__) and TOO_SELDOM not in told:
        return ""
    return told.partition("\n")[0] or result.verdict.value


def _is_its_end(arm: ArmResult, result: Result) -> bool:
    """Whether an arm says that the steps come to their end, or that they move nothing that could be compared."""
    if arm.name == TRAINS:
        return arm.verdict == Verdict.UNKNOWN.value or AS_NAN in arm.sentence
    in_a_step = result.failed_op is not None and result.failed_op.name in ("step", FIT)
    return (arm.name == WHOLE or arm.name.startswith(ALIKE)) and arm.verdict in ENDED and in_a_step


def told_of(cell: str, ended: str) -> str:
    """A sentence on a longer run that is no part of the report. cell: in words. ended: see `cut_short`."""
    return (
        f"{cell}: this longer run was tried, for what a learning-rate schedule or the data do later, and is left out, "
        f"since it came to no end that could be compared: {ended.rstrip(': ')}"
    )
