"""The arm `alike` of a cell: another value of an axis is another way to compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from shardproof.diagnosis.arrangement import distinct
from shardproof.diff import Difference
from shardproof.observe.assemble import as_bits
from shardproof.observe.settings import SETTING
from shardproof.program import Op
from shardproof.trainer.arms import WHOLE, Session
from shardproof.trainer.cells import values_of
from shardproof.trainer.data.given import data_apart, of_another_step, rows_apart
from shardproof.trainer.described import BITS, ROUNDING_BF16
from shardproof.trainer.judge.at_the_end import end_not_seen, with_the_end
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.judge.lines_of_cell import lines_of, lines_of_build, lines_of_some
from shardproof.trainer.judge.portrait import side_by_side
from shardproof.trainer.judge.whose_data import data_repeat
from shardproof.trainer.lines.lines_of_ranks import changed_between, drawn_by_ranks, makers_of_gradients
from shardproof.trainer.lines.statements import Moment
from shardproof.trainer.step.backward_apart import (
    averaged_apart,
    backward_apart,
    counts_of,
    other_lengths,
    same_lengths,
    some_come_out_alike,
    without_names,
)
from shardproof.trainer.step.calls import first_not_finite, recomputed_apart, where_they_part
from shardproof.trainer.step.collectives import reductions_apart
from shardproof.trainer.step.measured import NOTHING
from shardproof.trainer.step.samples import weighed_apart
from shardproof.trainer.step.shared import differs_where_shared, tied_in_one
from shardproof.trainer.step.updates import GROUPED, grouped_apart, how_often, optimizers_step, stepped_apart
from shardproof.trainer.values import wording
from shardproof.trainer.values.arranged import arranged
from shardproof.trainer.values.counted import by_the_axis, plain_number, with_counted
from shardproof.trainer.values.every_mesh import OF_MODULES, Name, is_of_data, of_both
from shardproof.trainer.values.gradients import may_be_stepped, reached_apart
from shardproof.trainer.values.not_finite import where_first
from shardproof.trainer.values.notes import (
    as_counts,
    as_rounding,
    drawn_otherwise,
    of_noise,
    of_one_way,
    rounding,
    taken_for_settings,
)
from shardproof.trainer.values.one_name import under_one_name
from shardproof.trainer.values.rates import rates_apart, used_rates, used_rates_apart
from shardproof.trainer.values.rounding import (
    HALF,
    PARAMS,
    ROUNDING,
    At,
    beyond_rounding,
    computes_in_half,
    may_follow_noise,
)
from shardproof.trainer.values.scaled import NEAR, in_common
from shardproof.trainer.values.telling import paragraphs

MOST_NUMBERS = 3
"""Of numbers that two ways do not have alike, how many a sentence names."""

PRESENCE = ("missing", "extra")
"""Kinds of difference of what one side alone has."""


RIGHT_OF_A_SCALE = (
    "That is right of a loss scale, and of an optimizer that clips, or adds a decay, inside its step; a clip, or Adam, "
    "would hide it otherwise."
)


def alike(judging: Judging, session: Session) -> None:
    """The way of this cell against the first value of the axis."""
    if WHOLE in judging.failures or judging.ended(session):
        return
    promise, first = judging.trainer.alike[session.of], judging.trainer.axes[session.of][0]
    exactly, half = promise == BITS, promise == ROUNDING_BF16
    start: At = {}
    begun: tuple[At, At] | None = None
    wrong, left_out, settings, drawn = list[Difference](), set[Name](), set[Name](), set[Name]()
    noise, followed = set[str](), set[Name]()
    farthest, apart, absent, rounds = 0.0, (-1, -1), list[Op](), False
    moments = {(op.kind, op.iteration): op.index for op in judging.whole.ops}
    for op in session.ops:
        if op.kind == "fit" or wrong:
            continue
        apart = op.index, moments[op.kind, op.iteration]
        first_way, own_way, alone = under_one_name(judging.at(apart[0]), judging.at(apart[1]))
        ways, left_out = (first_way, own_way), left_out | alone
        both, begun = of_both(*ways), begun or ways
        half = half or (computes_in_half(both.one) and computes_in_half(both.other))
        both = with_counted(both, ways, begun, half=half, exactly=exactly)
        start, left_out, settings = start or both.one, left_out | both.left_out, settings | both.settings
        drawn |= both.drawn
        found = judging.compare(both.one, both.other, op.index)
        beyond, share, tiny = beyond_rounding(found, start, both.one, both.other, half=half and not exactly)
        wrong = sorted(found if exactly else beyond, key=lambda one: one.kind in PRESENCE)
        if noise and not exactly and all(may_follow_noise(one, both.one) for one in wrong):
            followed, wrong = followed | {_name(one) for one in wrong}, []
        noise |= set[str]() if exactly else tiny
        farthest, rounds = max(farthest, share), exactly and not beyond
        if wrong and wrong[0].kind in PRESENCE:  # what is in one way only may hide values that differ later
            absent, wrong = [*absent, op], []
    if absent and not wrong:
        apart = absent[0].index, moments[absent[0].kind, absent[0].iteration]
        both = of_both(judging.at(apart[0]), judging.at(apart[1]))
        wrong = judging.compare(both.one, both.other, apart[0])
        still = {name for name in map(_name, wrong) if _stays(judging, session, name)}
        wrong, left_out = [one for one in wrong if _name(one) not in still], left_out | still
    ranks = max(op.mesh.world for each in (session, judging.whole) for op in each.ops)
    left = ((partial(of_one_way, ranks=ranks), left_out), (taken_for_settings, settings), (drawn_otherwise, drawn))
    notes = [tell(names) for tell, names in left if names]
    notes += [rounding(farthest, half=half)] if farthest and not wrong else []
    notes += [of_noise(noise, followed)] if noise else []
    notes += [*end_not_seen(judging, session)]
    one, other = (f"{session.of}={text}" for text in (first, values_of(judging.trainer, judging.scenario)[session.of]))
    if judging.unsteady and not judging.looked_at:
        judging.not_compared(session.name, wording.unsteady_way(one, other))
        return
    first_step = next((op for op in session.ops if op.kind == "step"), None)
    if first_step and not wrong:
        ops = first_step.index, moments["step", first_step.iteration]
        hidden = _backward(judging, ops, (one, other), HALF if half else NEAR, common=True)
        notes += [f"equal, and yet: {hidden} {RIGHT_OF_A_SCALE}"] if hidden else []
    told = ""
    if wrong and (begins := _begin_apart(judging, session, apart, (one, other), wrong)):
        told = begins
    elif wrong and rounds:
        judging.between = None  # what makes rounding is the order of sums
        told = f"{wording.of_alike(wrong, one, other, farthest)} {wording.ROUNDS_ALONE}"
    elif wrong:
        told = _said(judging, session, apart, (one, other), wrong, farthest, settings, half=half, exactly=exactly)
        counts = [by_the_axis([judging.at(op) for op in apart], each, _ratio((one, other))) for each in wrong]
        told = paragraphs(told, as_counts(counts) if all(counts) else "")
    wrong, told = with_the_end(judging, session, wrong, told, (f"with {other}", f"with {one}"))
    judging.add(session.name, wrong, told, notes)


def _name(difference: Difference) -> Name:
    return difference.key.role, difference.key.fqn


def _stays(judging: Judging, session: Session, name: Name) -> bool:
    """Whether a parameter or a buffer that one of two ways alone has is the same in all of its steps there, so that
    nothing trains it, as an adapter that lies beside the one in use, or weights that are quantised in one way."""
    ways = [{judging.at(op.index).get(name) for op in each.ops if op.index in judging.seen} for each in
            (session, judging.whole)]  # fmt: skip
    return name[0] in OF_MODULES and all(len(values) == 1 for values in ways)


def _begin_apart(
    judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str], wrong: Sequence[Difference]
) -> str:
    """What is said of two ways whose values are apart right after `build`; empty of all others. What steps do is left
    out: they could not come to the same. ops: as in `_how_often`."""
    first = next((op for op in session.ops if op.index == ops[0]), None)
    if first is None or first.kind != "build" or all(one.kind in PRESENCE for one in wrong):
        return ""
    judging.between = None  # what explains values speaks of steps
    apart = sorted({one.key.fqn for one in wrong if one.key.role == PARAMS})
    alike = sorted({name for role, name in judging.at(ops[1]) if role == PARAMS} - {*apart})
    some = f"{len(apart)} of {len(apart) + len(alike)} parameters{in_common(apart, alike)} are apart."
    parts = (
        wording.begin_apart(wrong, *names),
        some if apart and alike else "",
        wording.of_alike(wrong, *names, wording.NOT_MEASURED),
        arranged(wrong, judging.at(ops[0]), judging.at(ops[1]), names),
        _shared(judging, session, ops, names, wrong),
    )
    return paragraphs(" ".join(filter(None, parts)), lines_of_build(judging, ops, names, wrong))


def _said(
    judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str], wrong: Sequence[Difference],
    farthest: float, settings: Collection[Name], *, half: bool, exactly: bool,
) -> str:  # fmt: skip
    """What two ways differ in, and what is known of why. ops: as in `_how_often`. settings: names of plain values that
    are not alike from the beginning."""
    rates, factor = _rates(judging, ops, names)
    rates += _numbers(judging, ops, names, settings) if rates else ""
    if judging.between:
        own = {name: value for name, value in judging.at(ops[1]).items() if name[0] == SETTING}
        seen = judging.gradients.get(ops[1], {})
        judging.between = replace(
            judging.between,
            against=names[0],
            gradients=seen,
            settings=own,
            rates=factor,
            ratio=_ratio(names),
            rates_differ=bool(rates),
            stepped=(_used_rates(judging, ops[0]), _used_rates(judging, ops[1])),
        )
    if len({*_steps(judging, ops)}) > 1:
        judging.between = None  # what explains values speaks of one step of an optimizer
    one, other = (judging.calls.get(op, {}) for op in ops)
    near = 0.0 if exactly else HALF if half else ROUNDING
    ways = f"With {names[0]}", f"With {names[1]}"
    stepped = may_be_stepped([(each.key.role, each.key.fqn) for each in wrong],
                             [judging.gradients.get(op, {}) for op in ops])  # fmt: skip
    mine, its = (judging.measured.get(op, {}) for op in ops)
    left = len(mine) == len(its) and same_lengths(mine, its, near or NEAR)
    parted = where_they_part(one, other, ways, near, stepped=stepped, left=left) if _same_data(judging, ops) else ""
    of_data = any(is_of_data((one.key.role, one.key.fqn)) for one in wrong)
    used = all(_used_rates(judging, op) for op in ops)
    counts_alone = all(_is_plain(judging, ops[1], one) for one in wrong)
    given = _rows(judging, session, ops, names) or _order(judging, session, ops, names) or _samples(judging, ops, names)
    causes = (recomputed_apart(one, other, ways, near), _drawn_in_build(judging, session) if given else "", given)
    measured = (
        reached_apart(judging.gradients.get(ops[0], {}), judging.gradients.get(ops[1], {}), names),
        stepped_apart(judging.at(ops[0]), judging.at(ops[1]), names),
        grouped_apart(judging.at(ops[0]), judging.at(ops[1]), names, settings=GROUPED[: 1 if used else 2]),
        _how_often(judging, session, ops, names),
        "" if counts_alone else _weighed(judging, ops, names, near or NEAR),
        "" if counts_alone else _backward(judging, ops, names, near or NEAR),
    )
    pointed = not any((*causes, *measured))  # what may have made it is told where nothing was measured that did
    apart = (
        wording.of_alike(wrong, *names, farthest, "" if exactly else as_rounding(half=half), _when(session, ops[0])),
        "" if of_data else data_apart(judging.at(ops[0]), judging.at(ops[1]), names),
        _repeated(judging, session, names),
        arranged(wrong, judging.at(ops[0]), judging.at(ops[1]), names),
        _reduced(judging, session, ops, names) if pointed else "",
        _older(judging, session, ops, names, wrong) or rates or (parted if pointed and not counts_alone else ""),
        _shared(judging, session, ops, names, wrong),
    )
    gradients = not causes[0] and _gradients_apart(judging, ops, wrong, near or NEAR)
    first, lines = lines_of(judging, session, ops, names, near, wrong, gradients=gradients, reached=bool(measured[0]))
    if judging.between and (first or causes[0]):
        judging.between = replace(judging.between, known=True)
    return paragraphs(
        " ".join(filter(None, causes)),
        first,
        " ".join(filter(None, (_between(judging, ops, names), *measured, _not_finite(judging, ops, names, wrong)))),
        " ".join(filter(None, apart)),
        side_by_side(judging, session, ops, names),
        lines_of_some(judging, ops, names, wrong),
        lines,
    )


def _same_data(judging: Judging, ops: tuple[int, int]) -> bool:
    """Whether each rank's model was given the same in both ways, so far as anybody knows. ops: as in `_how_often`."""
    one, other = (judging.given.get(op, {}) for op in ops)
    return not one or not other or one == other


def _weighed(judging: Judging, ops: tuple[int, int], names: tuple[str, str], near: float) -> str:
    """Which samples the loss weighs otherwise; one factor for all is told where the backward makes one of it, too, and
    no gradient comes out right all the same."""
    one, other = (judging.measured.get(op, {}) for op in ops)
    mine, its = (judging.samples.get(op, {}) for op in ops)
    common = not same_lengths(one, other, near) and not some_come_out_alike(one, other, near)
    return weighed_apart(mine, its, names, common=common)


def _reshaped(judging: Judging, ops: tuple[int, int]) -> set[str]:
    """The parameters of both ways that have another shape in either. ops: as in `_how_often`."""
    mine, its = (judging.at(op) for op in ops)
    return {key[1] for key in mine.keys() & its.keys() if key[0] == PARAMS and mine[key].shape != its[key].shape}


def _gradients_apart(judging: Judging, ops: tuple[int, int], wrong: Sequence[Difference], near: float) -> bool:
    """Whether a backward leaves gradients of another length in one of two ways or, of other numbers of ranks, whether
    parameters come out otherwise."""
    one, other = (judging.measured.get(op, {}) for op in ops)
    params = [{name for role, name in judging.at(op) if role == PARAMS} for op in ops]
    if not one or not other or params[0] != params[1] or _reshaped(judging, ops):
        return False
    if len(one) == len(other):
        return other_lengths(one, other, near)
    return any(each.key.role == PARAMS for each in wrong)


def _when(session: Session, last: int) -> str:
    """After which step two ways are apart that were equal after the one before, with a space in front; empty of the
    first step."""
    steps = [op for op in session.ops if op.kind == "step"]
    step = next((op.iteration for op in steps[1:] if op.index == last), None)
    return "" if step is None else f" after step {step}, and not before"


def _backward(
    judging: Judging, ops: tuple[int, int], names: tuple[str, str], near: float, *, common: bool = False
) -> str:
    """Which gradients the backward leaves otherwise. ops: as in `_how_often`. near: what counts as rounding. common: as
    in `backward_apart`."""
    reshaped = _reshaped(judging, ops)
    one, other = (without_names(judging.measured.get(op, {}), reshaped) for op in ops)
    counts = counts_of(other, judging.model_calls.get(ops[1], {}))
    calls = [judging.model_calls.get(op, {}) for op in ops]
    lengths = backward_apart(one, other, names, counts, near, reshaped=len(reshaped), common=common)
    told = (
        f"{lengths}{makers_of_gradients(judging.ran.get(ops[1], {}))}" if lengths else "",
        averaged_apart(one, other, calls, near),
    )
    return " ".join(filter(None, told))


def _between(judging: Judging, ops: tuple[int, int], names: tuple[str, str]) -> str:
    """Which lines change gradients between the backwards of a step in one way alone. ops: as in `_how_often`."""
    ran, ways = [judging.ran.get(op, {}).get(0) for op in ops], (f"with {names[0]}", f"with {names[1]}")
    return judging.explained(lambda: changed_between(ran, ways))


def _reduced(judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str]) -> str:
    """Reductions that the one way makes more often than the other in a step. ops: as in `_how_often`."""
    if session.ops[0].mesh != judging.whole.ops[0].mesh:
        return ""
    one, other = (judging.collectives.get(op, {}) for op in ops)
    return reductions_apart(one, other, names)


def _ratio(names: tuple[str, str]) -> float:
    """By which factor the two values of an axis are apart, such as 4 and 1; 0 where they are no numbers."""
    try:
        one, other = (float(name.partition("=")[2]) for name in names)
        return other / one
    except (ValueError, ZeroDivisionError):
        return 0.0


def _is_plain(judging: Judging, op: int, difference: Difference) -> bool:
    """Whether what differs is a plain number or text, which no module computes."""
    value = judging.at(op).get((difference.key.role, difference.key.fqn))
    return value is not None and value.dtype == "utf8"


def _repeated(judging: Judging, session: Session, names: tuple[str, str]) -> str:
    """That one of the ways alone is given data again in the same order."""
    told = [data_repeat(judging, each) for each in (session, judging.whole)]
    if bool(told[0]) == bool(told[1]):
        return ""
    return next(f"With {way}, {text}." for text, way in zip(told, names, strict=True) if text)


def _rates(judging: Judging, ops: tuple[int, int], names: tuple[str, str]) -> tuple[str, float]:
    """Rates that are not alike in the step or, where that is unknown, before it; or else behind it: `rates_apart`. ops:
    as in `_how_often`."""
    one, other = (_used_rates(judging, op) for op in ops)
    used = used_rates_apart(one, other, names)
    before = used if one and other else rates_apart(judging.at(ops[0] - 1), judging.at(ops[1] - 1), names)
    known = before[0] or (one and other)
    return before if known else rates_apart(judging.at(ops[0]), judging.at(ops[1]), names)


def _used_rates(judging: Judging, op: int) -> dict[str, tuple[int, float]]:
    """The learning rates that parameters were stepped with in an operation, as rank 0 has them; none where optimizers
    of two kinds stepped, whose groups have the same numbers."""
    step = judging.measured.get(op, {}).get(0, NOTHING)
    return used_rates(step.rates, judging.at(op)) if len(step.steps) < 2 else {}


def _numbers(judging: Judging, ops: tuple[int, int], names: tuple[str, str], settings: Collection[Name]) -> str:
    """The first numbers of the trainer's own that are taken for settings, those of a schedule first; with a space in
    front."""
    one, other = (judging.at(op) for op in ops)
    told = list[str]()
    own = [name for name in settings if name[0] != SETTING]
    for name in sorted(own, key=lambda name: ("sched" not in name[1], name)):
        mine, its = (plain_number(way, name).partition(" ")[2] for way in (one, other))
        if mine and its:
            told.append(f"{name[1]} is {mine} with {names[0]} and {its} with {names[1]}")
    return f" Not alike besides: {', '.join(told[:MOST_NUMBERS])}." if told else ""


def _rows(judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str]) -> str:
    """That two ways were given other numbers of rows in a step, or in one before it. ops: as in `_how_often`."""
    sessions = (session, judging.whole)
    if judging.elements.get(ops[0], 0) == judging.elements.get(ops[1], 0):
        return ""  # other cuts of the same
    steps = [op.iteration for op in session.ops if op.kind == "step" and op.index <= ops[0]]
    rows = [[judging.rows.get(judging.step(each, step), 0) for step in steps] for each in sessions]
    given = dict(zip(steps, zip(*rows, strict=True), strict=True))
    alike = session.ops[0].mesh == judging.whole.ops[0].mesh
    told = (rows_apart(given, step, names, alike=alike) for step in steps)
    return next(filter(None, told), "")


def _drawn_in_build(judging: Judging, session: Session) -> str:
    """A sentence on the random states that two ways do not leave alike after `build`; empty where they do."""
    builds = [each.ops[0] for each in (session, judging.whole)]
    if any(each.kind != "build" for each in builds):
        return ""
    both = of_both(*(judging.at(each.index) for each in builds))
    told = ", ".join(sorted(name for _, name in both.drawn))
    return f"The two leave `build` with another state of what draws random numbers: {told}." if told else ""


def _order(judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str]) -> str:
    """That a way was given the data of another step of the other's. ops: as in `_how_often`."""
    steps = [op.iteration for op in session.ops if op.kind == "step"]
    first = {step: judging.given.get(judging.step(session, step), {}) for step in steps}
    done = [step for step in steps if judging.step(session, step) <= ops[0]]
    own = ((judging.given.get(judging.step(judging.whole, step), {}), step) for step in done)
    return next(filter(None, (of_another_step(given, step, first, names) for given, step in own)), "")


def _samples(judging: Judging, ops: tuple[int, int], names: tuple[str, str]) -> str:
    """That two ways are given other samples in a step, on all ranks together. ops: as in `_how_often`."""
    one, other = (
        Counter(row for own in judging.model_calls.get(op, {}).values() for call in own for row in call.rows)
        for op in ops
    )
    lacking = (one - other).total()
    widths = [judging.elements.get(op, 0) for op in ops]
    if not lacking or one.total() != other.total() or widths[0] != widths[1]:  # such as the same with other padding
        return ""
    again = max(other.values()) > 1 and max(one.values()) == 1
    more = f", where some come more than once with {names[1]}" if again else ""
    rows = {rank: [row for call in own for row in call.rows] for rank, own in judging.model_calls[ops[1]].items()}
    strange = [rank for rank, own in sorted(rows.items()) if {*own} - {*one}]
    whose = f", all of them of rank {strange[0]}" if len(rows) > len(strange) == 1 else ""
    moments = [Moment(op, judging.ran.get(op.index, {})) for op in judging.whole.ops if op.index <= ops[1]]
    draws = judging.explained(lambda: drawn_by_ranks(moments)) if len(rows) > 1 else ""
    return (
        f"{lacking} of the {one.total()} samples that the ranks are given in this step with {names[0]} are not among "
        f"those with {names[1]}{more}: look at what chooses them, puts them in order, or changes them on their way. "
        f"{f'Others come instead{whose}. ' if whose else ''}{draws}"
    ).strip()


def _older(
    judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str], wrong: Sequence[Difference]
) -> str:
    """That one of the ways has the values of a moment before its last one, as after the load of an older checkpoint. A
    way that has those of its last moment may have skipped the step. ops: as in `_how_often`."""
    keys = [(one.key.role, one.key.fqn) for one in wrong]
    for each, op, way in zip((session, judging.whole), ops, names, strict=True):
        now, last, *before = [
            (moment, of_both(judging.at(moment.index), judging.at(moment.index)).one)
            for moment in reversed(each.ops) if moment.index <= op and moment.kind != "fit"
        ] + [(each.ops[0], {})] * 2  # fmt: skip
        for moment, values in before:
            there = all(key in values and values[key] == now[1].get(key) for key in keys)
            if not there or not any(distinct(as_bits(values[key])) > 1 for key in keys):
                continue  # constants are no state that anybody has come to
            if any(values[key] != last[1].get(key) for key in keys):
                return f"These are the values after {wording.at(moment)} with {way}: an older state was put back."
    return ""


def _how_often(judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str]) -> str:
    """How often either way updated in a step. ops: of the session, which has the axis' first value, and of this cell's
    own way."""
    step = next((op.iteration for op in session.ops if op.index == ops[0] and op.kind == "step"), -1)
    ways = [(judging.at(op - 1), judging.at(op)) for op in ops]
    if step < 0:
        return ""
    return how_often(ways[0], ways[1], names, step) or optimizers_step(_steps(judging, ops), names, step)


def _steps(judging: Judging, ops: tuple[int, int]) -> tuple[int, int]:
    """How often optimizers stepped in a step on the first rank, in both ways; 0 where nobody knows."""
    one, other = (judging.measured.get(op, {}).get(0, NOTHING) for op in ops)
    return sum(one.steps.values()), sum(other.steps.values())


def _shared(
    judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str], wrong: Sequence[Difference]
) -> str:
    """What parameters of several names have to do with it. ops: as in `_how_often`.

    A library may put what it shards in the place of parameters after `build`, and take it away again in a step.
    """
    built = [judging.shared.get(each.ops[0].index, set()) for each in (session, judging.whole)]
    ways = [judging.shared.get(op, set()) for op in ops]
    params = [{name for role, name in judging.at(op) if role == PARAMS} for op in ops]
    differ = {one.key.fqn for one in wrong if one.key.role == PARAMS}
    there = params[0] & params[1]
    told = tied_in_one(built, names, there) or tied_in_one(ways, names, there)
    return told or differs_where_shared(differ, there, ways[0] & ways[1])


def _not_finite(judging: Judging, ops: tuple[int, int], names: tuple[str, str], wrong: Sequence[Difference]) -> str:
    """Where the first NaN or infinity is, of values that have one in one of the two ways alone. ops: as above."""
    kind = next(op for op in judging.whole.ops if op.index == ops[1])
    when = f"in step {kind.iteration}" if kind.kind == "step" else f"after `{kind.kind}`"
    for (op, other), way in zip((ops, ops[::-1]), names, strict=True):
        keys = [(one.key.role, one.key.fqn) for one in wrong]
        own, elsewhere = judging.at(op), judging.at(other)
        calls = "" if first_not_finite(judging.calls.get(other, {})) else first_not_finite(judging.calls.get(op, {}))
        if told := where_first(keys, own, elsewhere, calls, judging.gradients.get(op, {})):
            return f"With {way}, NaN or infinity comes up {when}: {told}."
    return ""
