"""Where the sessions of a cell part, line by line: `shardproof.trainer.lines.lines_apart` for two of a judgement."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.diff import Difference
from shardproof.program import Op
from shardproof.trainer.arms import TWICE, Session
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.lines.lines_apart import (
    DECIDED,
    OUT_OF_ALIKE,
    READ,
    TURN,
    apart_in,
    begin_apart,
    never_alike,
    sentence,
)
from shardproof.trainer.lines.lines_of_ways import of_two_ways
from shardproof.trainer.lines.statements import Moment, Name
from shardproof.trainer.values.telling import paragraphs


def line_by_line(
    judging: Judging, session: Session, other: Session, found: Sequence[Difference], ways: tuple[str, str], *,
    random: bool = False,
) -> str:  # fmt: skip
    """Where a session parts from another one, in the steps until the first difference or, where they differ right after
    a load, in the first step behind it; empty where none of the trainer's own statements tells.

    Args:
        found: the differences. ways: what a sentence calls the other one, and this one. random: whether random states
            were not alike before.
    """
    if not found or not judging.ran:
        return ""
    told = judging.explained(lambda: _parted(judging, session, other, found, ways))
    return (
        told.replace(OUT_OF_ALIKE, "out of a random state that is not alike, or of what is alike,") if random else told
    )


def _parted(
    judging: Judging, session: Session, other: Session, found: Sequence[Difference], ways: tuple[str, str]
) -> str:
    """The same of sessions that differ. Arguments as in `line_by_line`."""
    last = found[0].key.op
    pairs = [(there, here) for there, here in _pairs(session, other) if there.index in judging.ran]
    done = [pair for pair in pairs if pair[1].index <= last]
    at_once = not done or done[-1][1].index < last
    leave = never_the_same(judging) if session.kind != TWICE else set()
    for there, here in pairs[: len(done) + at_once]:
        one, own = judging.ran.get(there.index, {}), judging.ran.get(here.index, {})
        apart = apart_in(one, own, leave)
        if apart is None:
            continue
        rank, parting = apart
        plain = parting.kind in (TURN, DECIDED) or (parting.kind == READ and parting.first and parting.first.is_plain)
        if (at_once or begin_apart(one, own)) and not plain:  # it follows from what is not alike before
            return ""
        moments = (_until(judging, other, there), _until(judging, session, here))
        told = sentence(rank, parting, ways, moments)
        more = of_two_ways(one, own, (f"in {ways[0]}", f"in {ways[1]}"), numbers=False) if not at_once else ""
        return paragraphs(told, more)
    return ""


def _pairs(session: Session, other: Session) -> list[tuple[Op, Op]]:
    """The steps that two sessions share, and what comes before them where both are the same."""
    alike = ("build", "step") if session.kind == TWICE else ("step",)
    there = {(op.kind, op.iteration): op for op in other.ops}
    return [(there[op.kind, op.iteration], op) for op in session.ops
            if op.kind in alike and (op.kind, op.iteration) in there]  # fmt: skip


def _until(judging: Judging, session: Session, last: Op) -> list[Moment]:
    return [Moment(op, judging.ran.get(op.index, {})) for op in session.ops if op.index <= last.index]


def never_the_same(judging: Judging) -> set[Name]:
    """What two runs of the same do not have alike."""
    twice, found = judging.named(TWICE), set[Name]()
    for op, again in zip(judging.whole.ops, twice.ops if twice else (), strict=False):
        found |= never_alike(judging.ran.get(op.index, {}), judging.ran.get(again.index, {}))
    return found
