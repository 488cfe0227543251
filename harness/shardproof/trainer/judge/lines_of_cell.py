"""What the lines of a trainer say of two ways of a cell to compute the same, where these come to different values.

*Verifies*: that the statements ran so. *Does not verify*: that one of them makes what differs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from shardproof.diff import Difference
from shardproof.trainer.arms import Session
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.judge.line_by_line import never_the_same
from shardproof.trainer.lines.first_apart import Where, cutting, first_apart, value_alike
from shardproof.trainer.lines.flows_apart import flow_apart
from shardproof.trainer.lines.held import CLOSE
from shardproof.trainer.lines.lines_apart import who_set
from shardproof.trainer.lines.lines_of_ranks import (
    built_otherwise,
    gradients_otherwise,
    scaled_by_ranks,
    touch_alone,
    written_otherwise,
)
from shardproof.trainer.lines.lines_of_state import never_hold
from shardproof.trainer.lines.lines_of_ways import of_two_ways
from shardproof.trainer.lines.nested import handed_over
from shardproof.trainer.lines.rates_set import rates_set
from shardproof.trainer.lines.run_again import run_again
from shardproof.trainer.lines.setters import handed_apart, who_set_read
from shardproof.trainer.lines.statements import Moment, Name, OfRanks, Statement, is_cut, not_held, touched, unpacked
from shardproof.trainer.values.every_mesh import OF_MODULES, of_lasting
from shardproof.trainer.values.rounding import HALF, PARAMS
from shardproof.trainer.values.telling import paragraphs
from shardproof.trainer.values.wording import at


def lines_of(
    judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str], near: float,
    wrong: Sequence[Difference], *, gradients: bool, reached: bool,
) -> tuple[str, str]:  # fmt: skip
    """Two texts on the trainer's own lines: which of them makes a value first that two ways do not have alike, or lets
    another gradient through, or sets another rate; and which they do not run alike, when they are built and in the step
    in question.

    Args:
        near: what counts as rounding. wrong: the differences. gradients: whether a backward leaves other ones.
            reached: whether some parameters get a gradient in one way alone.
    """
    both = session, judging.whole
    built = [judging.ran.get(each.ops[0].index, {}) if each.ops[0].kind == "build" else {} for each in both]
    ways = f"with {names[0]}", f"with {names[1]}"
    step = judging.ran.get(ops[0], {}), judging.ran.get(ops[1], {})
    one, other = ([Moment(op, judging.ran.get(op.index, {})) for op in each.ops if op.index <= last]
                  for each, last in zip(both, ops, strict=True))  # fmt: skip
    leave, close = never_the_same(judging), near if near == HALF else CLOSE
    tied = {name for op in ops for group in judging.shared.get(op, ()) for name in group}
    there = judging.at(ops[0]).keys() & judging.at(ops[1])
    names_of = (
        each.key.fqn for each in wrong if (each.key.role, each.key.fqn) in there and each.key.role in OF_MODULES
    )
    modules = [name for name in dict.fromkeys(names_of) if name not in tied]  # a line writes them under one name
    kept = [of_lasting(each.key.role, each.key.fqn) for each in wrong if each.key.role not in OF_MODULES]
    of_build = judging.explained(lambda: of_two_ways(built[0], built[1], ways, "of `build`"))
    if one[-1].op.kind != "step":
        return "", of_build
    where: Where | None = None

    def of_first() -> str:
        nonlocal where
        told, where = first_apart(*step, ways, close, leave)
        rows = [unpacked(way[0]) if 0 in way else () for way in step]
        callers = _callers(step, where) if where else []
        if where and callers:
            told += handed_apart(callers, where.path, ways)
        elif where and where.place and where.reads:
            told += who_set(rows, where.place, where.path, ways, (one, other))
        elif where and where.place and where.plain:
            who = who_set(rows, where.place, where.plain, ways, (one, other))
            told += f" As to `{where.plain}`:{who}" if who else ""
        elif where and not where.place:
            told += who_set_read(rows, where.places, ways, (one, other))
        return told + (run_again(step, where.places, ways) if where else "")

    first = judging.explained(of_first)

    def of_step() -> str:
        seen = 0 in step[0].keys() & step[1] and not any(is_cut(way[0]) for way in step)
        moments = {each.op.index: f"after {at(each.op)}" for each in (*one, *other)}
        written = written_otherwise(step[0][0], step[1][0], [*modules, *kept], ways, moments) if seen else ""
        touched = gradients_otherwise(step[0][0], step[1][0], ways) if seen else ""
        lines = of_two_ways(*step, ways, moments=(one, other), until=where and where.place, wrong=[*modules, *kept])
        skipped = never_hold((one, other), ways) if gradients or not first else ""
        return paragraphs(touched, scaled_by_ranks(step[1]), written, lines, skipped)

    of_backward = (
        ""
        if first or not (gradients or reached)
        else judging.explained(partial(_of_backward, step, ways, close, reached=reached))
    )
    early = False

    def of_rates() -> str:
        nonlocal early
        rates, at = rates_set(one, other, ways)
        early = at >= 0
        return paragraphs(rates, "" if first or not early else _in_step(at, (one, other), ways, close, leave))

    rates = judging.explained(of_rates)
    beyond = "" if first else not_held(step[0]) or not_held(step[1])
    made = paragraphs(first, beyond, of_backward)
    # rates of a step before are why this one makes other values, and those of this step may follow from these
    told = paragraphs(rates, made) if early else paragraphs(made, rates)
    return told, paragraphs(judging.explained(of_step), of_build)


def _of_backward(step: tuple[OfRanks, OfRanks], ways: tuple[str, str], near: float, *, reached: bool) -> str:
    """Return what lets other gradients through in two ways of which all values are alike."""
    alike = value_alike(*step, ways, near)
    cut = cutting(*step, ways) if reached and not alike else ""
    return paragraphs(flow_apart(*step, ways, near), alike, cut)


def _in_step(
    number: int, moments: tuple[Sequence[Moment], Sequence[Moment]], ways: tuple[str, str], near: float,
    leave: Collection[Name],
) -> str:  # fmt: skip
    """Return the first value of an earlier step that two ways do not have alike or, without one, the lines that they do
    not run alike there; empty where either has not run the step."""
    there = [each.ran for own in moments for each in own if each.op.kind == "step" and each.op.iteration == number]
    if len(there) != len(moments):
        return ""
    one, other = there
    told = first_apart(one, other, ways, near, leave, f"step {number}")[0]
    return told or of_two_ways(one, other, ways, f"of step {number}")


def _callers(step: tuple[OfRanks, OfRanks], where: Where) -> list[Statement]:
    """The statements that hand over what one reads in two ways as an argument, if they are not one and the same that
    reads the same."""
    both = zip(step, where.places, strict=True)
    found = [handed_over(way[0], place, where.path) for way, place in both if where.reads and 0 in way]
    callers = [each for each in found if each is not None]
    apart = len(callers) == len(step) and (callers[0].place, callers[0].values) != (callers[1].place, callers[1].values)
    return callers if apart else []


def lines_of_some(judging: Judging, ops: tuple[int, int], names: tuple[str, str], wrong: Sequence[Difference]) -> str:
    """Which lines touch just the parameters that differ, or just the others, in a step after which some are right."""
    apart = {one.key.fqn for one in wrong if one.key.role == PARAMS}
    right = {name for role, name in judging.at(ops[1]) if role == PARAMS} - apart
    if not apart or not right:
        return ""
    rows = [judging.ran.get(op, {}) for op in ops]

    def told() -> str:
        done = (touch.done for ran in rows if 0 in ran for touch in touched(ran[0]))
        touches = {name for each in done for own in each.values() for name in own}
        if not right & touches:  # as of a frozen model beside one that is trained
            return ""
        one, other = (touch_alone(ran[0], apart, right) if 0 in ran else [] for ran in rows)
        lines = [f"{line} {way}" for line in dict.fromkeys((*one, *other))
                 for way in [_in_ways(line in one, line in other, names)]]  # fmt: skip
        return f"Of the lines of this step, on rank 0: {'; '.join(lines)}." if lines else ""

    return judging.explained(told)


def _in_ways(one: bool, other: bool, names: tuple[str, str]) -> str:
    return "in both ways" if one and other else f"with {names[0] if one else names[1]}"


def lines_of_build(judging: Judging, ops: tuple[int, int], names: tuple[str, str], wrong: Sequence[Difference]) -> str:
    """Which lines of `build` set last what two ways begin with otherwise. ops: their builds."""
    ran = judging.ran.get(ops[0], {}), judging.ran.get(ops[1], {})
    if 0 not in ran[0].keys() & ran[1]:
        return ""
    ways, told = (f"with {names[0]}", f"with {names[1]}"), [each.key.fqn for each in wrong]
    return judging.explained(
        lambda: paragraphs(
            built_otherwise(ran[0][0], ran[1][0], told, ways),
            first_apart(*ran, ways, CLOSE, never_the_same(judging), "`build`")[0],
            of_two_ways(*ran, ways, "of `build`"),
        )
    )
