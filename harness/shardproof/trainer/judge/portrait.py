"""What a step of a trainer does, as measured: of a cell's own run, and of two ways to compute the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from shardproof.program import Op
from shardproof.trainer.arms import ENDS, MEASURED, READS, Session
from shardproof.trainer.cells import MESH_AXIS, values_of
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.lines.axes_read import axis_read
from shardproof.trainer.lines.statements import (
    BUFFERS,
    CHANGED,
    CLEARED,
    LASTING,
    MADE,
    WRITTEN,
    Moment,
    Touch,
    reductions_told,
    touched,
)
from shardproof.trainer.step.measured import GATHERED, LINE, NOTHING, REDUCED, order_of, portrait, rates_at
from shardproof.trainer.values.rounding import PARAMS
from shardproof.trainer.values.telling import times

MOST_LINES = 10
"""Statements of a step that a portrait names."""

MOST_ALONE = 6
"""Statements that a portrait names of another kind of step."""

MOST_RATES = 2
"""Learning rates that a portrait says a statement sets."""

DOES = {MADE: "makes", CHANGED: "changes", CLEARED: "clears"}


def portrayed(judging: Judging) -> list[str]:
    """Lines for the first step of the run without a break of which gradients were measured."""
    steps = [op for op in judging.whole.ops if op.kind == "step" and judging.measured.get(op.index)]
    measured = [op for op in steps if any(each.gradients for each in judging.measured[op.index].values())]
    for op in (measured or steps)[:1]:
        lines = [*_lines(judging, judging.whole, op.index), *_by_line(judging, op.index)]
        lines += _of_another_kind(judging, op, lines, [other for other in steps if other.index > op.index])
        return [f"{MEASURED}: step {op.iteration}: {line}" for line in lines]
    return []


def _of_another_kind(judging: Judging, first: Op, lines: Sequence[str], later: Sequence[Op]) -> list[str]:
    """The order of backwards and optimizers in the first later step that has another one, with the lines that touch
    something in it and not in the first, such as an exchange every so many steps."""
    own = order_of(judging.measured[first.index])
    op = next((op for op in later if order_of(judging.measured[op.index]) != own), None)
    if op is None:
        return []
    alone = [line for line in _by_line(judging, op.index) if line not in lines][:MOST_ALONE]
    return [f"step {op.iteration}: {line}" for line in (f"order: {order_of(judging.measured[op.index])}", *alone)]


def end_of(judging: Judging) -> list[str]:
    """A line that is the same for two cells whose parameters are so, bit for bit, after every step."""
    found = hashlib.sha256()
    for op in judging.whole.ops:
        values = judging.at(op.index)
        for role, name in sorted(values):
            if role == PARAMS:
                found.update(name.encode() + values[role, name].data)
    return [f"{ENDS}: {found.hexdigest()[:16]}"]


def axes_of(judging: Judging) -> list[str]:
    """A line for each axis that a step of any kind may depend on: what becomes of its value."""
    kinds = ("step",) if judging.trainer.fits else ("build", "step")  # a `fit` builds before its first update
    steps = [op for op in judging.whole.ops if op.kind in kinds][: len(kinds)]
    moments = [Moment(op, judging.ran.get(op.index, {})) for op in steps]
    if tuple(op.kind for op in steps) != kinds:
        return []
    axes = [axis for axis in judging.trainer.axes if axis != MESH_AXIS and axis not in judging.trainer.alike]
    texts = values_of(judging.trainer, judging.scenario)
    told = {axis: judging.explained(partial(axis_read, moments, axis, texts[axis])) for axis in axes if axis in texts}
    return [f"{READS}: {axis}: {text}" for axis, text in told.items() if text]


def side_by_side(judging: Judging, session: Session, ops: tuple[int, int], names: tuple[str, str]) -> str:
    """What a step does in two ways, where that is not alike; empty where it is.

    Args:
        session: of the other way. ops: of the other way, and of this cell's own. names: of both.
    """
    step = next((op.iteration for op in session.ops if op.index == ops[0] and op.kind == "step"), -1)
    if step < 0 or not all(judging.measured.get(op) for op in ops):
        return ""
    one, other = _lines(judging, session, ops[0]), _lines(judging, judging.whole, ops[1])
    apart = [
        [line for line in own if line not in its and not line.startswith((REDUCED, GATHERED))]
        for own, its in ((one, other), (other, one))
    ]
    if not all(apart):
        return ""
    first, second = ("; ".join(own) for own in apart)
    return f"As measured in step {step} with {names[0]}: {first}. With {names[1]}: {second}."


def _lines(judging: Judging, session: Session, op: int) -> list[str]:
    steps = [each.index for each in session.ops if each.kind == "step"]
    rates = [rates_at(judging.measured.get(index, {}).get(0, NOTHING), judging.at(index - 1)) for index in steps]
    return portrait(
        judging.measured[op], judging.model_calls.get(op, {}), judging.collectives.get(op, {}), judging.at(op - 1),
        rates if all(rates) else [],
    )  # fmt: skip


def _by_line(judging: Judging, op: int) -> list[str]:
    """Which of the trainer's own statements touch gradients, parameters and what lasts beside them in a step, in order,
    on rank 0."""
    ran = judging.ran.get(op, {}).get(0)
    each = [(touch.place, _done(touch)) for touch in touched(ran)] if ran else []
    lines = [f"{LINE}: {place} {done}" for place, done in each if done]
    more = [f"{LINE}: and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [*lines[:MOST_LINES], *more]


def _done(touch: Touch) -> str:
    """What a statement does, as `changes 2 gradients`."""
    told = []
    for what, names in touch.done.items():
        each = list(dict.fromkeys(names))
        often = f", {times(len(names) // len(each))}" if len(names) > len(each) else ""
        if what == WRITTEN:
            told.append(f"writes {each[0] if len(each) == 1 else f'{len(each)} parameters'}{often}")
        elif what == BUFFERS:
            told.append(f"writes the buffer {each[0]}" if len(each) == 1 else f"writes {len(each)} buffers")
        elif what == LASTING:
            more = f" and {len(each) - 1} more" * (len(each) > 1)
            told += [] if WRITTEN in touch.done else [f"writes {each[0]}{more}{often}"]
        else:
            one = f"the gradient of {each[0]}" if len(each) == 1 else f"{len(each)} gradients"
            told.append(f"{DOES[what]} {one}{often}")
    if touch.scaled and told:
        told[-1] += f", by a factor of {' or '.join(f'{factor:.5g}' for factor in touch.scaled)}"
    told += [f"sets the learning rate{which} from {old} to {new}" for which, old, new in touch.rated[:MOST_RATES]]
    told += [f"{len(touch.rated) - MOST_RATES} more rates"] if len(touch.rated) > MOST_RATES else []
    told += [f"sets {key}{which} from {old} to {new}" for which, key, old, new in touch.regrouped[:MOST_RATES] if old]
    told += [f"takes part in {reductions_told(touch.reduced)}"] if touch.reduced else []
    return " and ".join(told)
