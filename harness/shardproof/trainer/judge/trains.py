"""The arm `trains`: whether the run without a break moves its parameters, those that are to move and no others, and
whether what it moves them by is counted.

*Verifies*: that parameters move, and are numbers; that frozen ones, and those that the trainer calls `frozen`, do not;
that an optimizer's count of steps grows with the parameters that it steps. *Does not verify*: by how much they move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from shardproof.diff import Difference
from shardproof.observe.logical import Key
from shardproof.observe.record import LIVE
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.program import ARMS
from shardproof.result import ArmResult
from shardproof.trainer.arms import COPIES, KEYS, RESUMED, TRAINS, WHOLE
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.judge.longer import longer_program
from shardproof.trainer.judge.whose_data import data_repeat, ranks_overlap, same_data
from shardproof.trainer.lines.broadcast import paired
from shardproof.trainer.lines.caught import caught
from shardproof.trainer.lines.put_back import put_back
from shardproof.trainer.lines.rates_set import sets_often
from shardproof.trainer.lines.statements import WRITTEN, Moment, is_cut, touched
from shardproof.trainer.lines.uneven import uneven
from shardproof.trainer.lines.unread import dropped, over_nothing, unread, unread_settings
from shardproof.trainer.step.calls import recomputed
from shardproof.trainer.step.measured import NOTHING, mixed, rates_at, rates_told, scaled_apart, stale
from shardproof.trainer.step.model_calls import evaluates, padding_counts, same_rows, weighed_by_call
from shardproof.trainer.step.samples import zeroed_before
from shardproof.trainer.step.updates import grown_by
from shardproof.trainer.step.while_scaled import changed_while_scaled
from shardproof.trainer.values import wording
from shardproof.trainer.values.chosen import strangely_chosen
from shardproof.trainer.values.every_mesh import fits, without_rank
from shardproof.trainer.values.gradients import (
    GRADIENT,
    PASSED_OVER,
    UNDONE,
    OfParameters,
    are_frozen,
    has_master,
    stepped_frozen,
    together,
    why_each,
    why_still,
)
from shardproof.trainer.values.left_behind import left_behind
from shardproof.trainer.values.multiplied import multiplied
from shardproof.trainer.values.not_finite import is_wild, where_first
from shardproof.trainer.values.notes import (
    buffers_stay_zero,
    declared_frozen_moves,
    frozen_at_random,
    frozen_is_stepped,
    frozen_moves,
    never_moved,
    no_numbers,
    nothing_moves,
    nothing_trains,
    nothing_trains_later,
    own_tensors_move,
    rate_put_back,
    schedule_goes_on,
    schedule_runs_on,
    schedule_stands_still,
    stays_zero,
    step_at_rate_zero,
    uncounted,
)
from shardproof.trainer.values.overflows import SCHEDULER, all_overflow, overflows
from shardproof.trainer.values.plain import counted_apart, every_step_skipped
from shardproof.trainer.values.rates import ZERO, rates_in
from shardproof.trainer.values.rounding import FLOATS, PARAMS, At
from shardproof.trainer.values.schedule_base import above_the_base
from shardproof.trainer.values.staircase import staircase
from shardproof.verdict import Verdict


def trains(judging: Judging) -> None:
    """Look for a run that moves no parameter, as on one every other arm would pass; name parameters that stay."""
    moments = [op.index for op in judging.whole.ops if judging.at(op.index)]
    if WHOLE in judging.failures or len(moments) < 2:
        return
    last, notes = judging.at(moments[-1]), list[str]()
    if _frozen_moves(judging, notes) or _declared_frozen_moves(judging) or _uncounted(judging) or _scaled(judging):
        return
    still = _still(judging, moments[0], last)
    steps = [op.index for op in judging.whole.ops if op.kind == "step"]
    later = [index for index in steps if index > judging.saved]
    params = sum(key[0] == PARAMS and bool(value.data) for key, value in last.items())
    if wrong := _no_numbers(judging, last):
        _fail(judging, [not_a_number(name, moments[-1]) for name in wrong], no_numbers(wrong, _first_wild(judging)))
        return
    skipped = overflows([(op.iteration, judging.at(op.index - 1), judging.at(op.index)) for op in judging.whole.ops
                         if op.index in steps])  # fmt: skip
    own = _own_floats(judging, moments[0], last)
    moves = sorted(name for name, moved in own.items() if moved)
    template = _is_template(judging.at(moments[0]), still, moves)
    told_idle = {one for op in steps for each in judging.measured.get(op, {}).values() for one in each.idle}
    by_hand = not all_seen(judging, steps) and not told_idle
    if still and len(still) == params and template and by_hand:
        judging.found.append(ArmResult(TRAINS, Verdict.PASS.value, "", (own_tensors_move(moves),)))
        return
    if not params and own and not moves:
        judging.found.append(ArmResult(TRAINS, Verdict.PASS.value, "", (nothing_moves(len(steps), sorted(own)),)))
        return
    if still and len(still) == params:
        begun, ended = (judging.plain.get(op, {}) for op in (moments[0], moments[-1]))
        why = every_step_skipped(begun, ended, len(steps)) or all_overflow(skipped, len(steps))
        why = (
            why or why_still(still, all_seen(judging, steps)) or told_to_step(told_idle) or (BY_HAND if by_hand else "")
        )
        text = nothing_trains(len(steps), last, why)
    elif params and later and len(_still(judging, judging.saved, last)) == params:
        names = [key[1] for key in last if key[0] == PARAMS]
        seen = all_seen(judging, later)
        text = nothing_trains_later(len(later), last, why_still(names, seen) or why_each(names, seen))
    else:
        notes += [*_of_parameters(judging, still, params), *_of_steps(judging, [moments[0], *steps], last)]
        notes += [schedule_runs_on(one.step, one.scale) for one in skipped if one.schedule][:1]
        judging.found += [ArmResult(TRAINS, Verdict.PASS.value, "", tuple(notes))] if notes else []
        return
    judging.found.append(ArmResult(TRAINS, Verdict.UNKNOWN.value, text, ()))


def _of_parameters(judging: Judging, still: Sequence[str], number: int) -> Iterator[str]:
    """Notes on parameters that stay in a run that moves others. number: of all parameters."""
    undeclared = [name for name in still if not fits(without_rank(name), judging.trainer.frozen)]
    if not undeclared:
        return
    seen = all_seen(judging, [op.index for op in judging.whole.ops if op.kind == "step"])
    at_random = _frozen_at_random(judging, [name for name in undeclared if are_frozen([name], seen)])
    if at_random:
        yield frozen_at_random(at_random)
    undeclared.sort(key=lambda name: name not in at_random)
    why = why_each(undeclared, seen)
    if UNDONE in why and _untouched(judging, [name for name in undeclared if seen.get(name) == GRADIENT]):
        why = why.replace(UNDONE, PASSED_OVER)
    yield never_moved(undeclared, number, why)


def _untouched(judging: Judging, names: Collection[str]) -> bool:
    """Whether no line of the first rank changes any of these parameters in a step, while some lines change others."""
    steps = [judging.ran.get(op.index, {}).get(0, b"") for op in judging.whole.ops if op.kind == "step"]
    if not all(steps) or any(map(is_cut, steps)):
        return False
    written = {name for ran in steps for touch in touched(ran) for name in touch.done.get(WRITTEN, ())}
    return bool(written) and not written & {*names}


def _of_steps(judging: Judging, moments: Sequence[int], last: At) -> Iterator[str]:
    """Notes on what the steps of a run that trains do. moments: the build and the steps. last: what there was in the
    end."""
    _, *steps = moments
    states, numbers = [judging.at(op) for op in moments], [judging.plain.get(op, {}) for op in moments]
    zero = sorted(name for role, name in last
                  if role == "buffer" and stays_zero([state.get((role, name)) for state in states]))  # fmt: skip
    every = [Moment(op, judging.ran.get(op.index, {})) for op in judging.whole.ops]
    of_steps = [each for each in every if each.op.index in steps]
    lost = (zeroed_before(judging.samples.get(op.index, {}), op.iteration) for op in judging.whole.ops)
    yield from filter(None, (
        left_behind(states),
        buffers_stay_zero(zero) if zero else "",
        data_repeat(judging, judging.whole),
        same_data(judging),
        ranks_overlap(judging),
        counted_apart(numbers, _updates(judging, steps)),
        judging.explained(lambda: uneven(numbers, of_steps)),
        judging.explained(lambda: put_back(every)),
        judging.explained(lambda: paired(of_steps[:1])),
        judging.explained(lambda: caught(of_steps)),
        judging.explained(lambda: over_nothing(of_steps)),
        judging.explained(lambda: unread(of_steps)),
        judging.explained(lambda: dropped(of_steps)),
        judging.explained(lambda: unread_settings(every)),
        next(filter(None, lost), ""),
        next(filter(None, (recomputed(judging.calls.get(op.index, {}), op.iteration) for op in judging.whole.ops)), ""),
        _at_rate_zero(judging),
        staircase(states[0]),
        above_the_base(states[0]),
        *strangely_chosen(states[0]),
        _multiplied(judging),
        judging.explained(lambda: _changed_while_scaled(judging)),
        *_measured(judging),
        _schedule(judging, last),
    ))  # fmt: skip


BY_HAND = (
    "no optimizer of torch steps there, so that what your own update is made of is not seen: look at the gradients "
    "that it is given, which may be zeros, or those of another function than the loss"
)


def told_to_step(idle: Collection[str]) -> str:
    """Why parameters stay, where optimizers step while none of theirs has a gradient; empty where none does."""
    names = " and ".join(sorted(idle))
    return f"{names} is told to step while none of its parameters has a gradient, such as masters" if idle else ""


def _is_template(begun: At, still: Collection[str], moves: Collection[str]) -> bool:
    """Whether each parameter that stays has a tensor beside it that begins as its copy, and moves, as where a module is
    the template of `torch.func.functional_call`; moments of an update that nobody writes back begin as none."""
    copies = {begun[EXTRA_STATE, name] for name in moves}
    return all(begun[PARAMS, name] in copies for name in still)


def _own_floats(judging: Judging, first: int, last: At) -> dict[str, bool]:
    """The tensors of floats that hang on the trainer, and on no module → whether they change in the run."""
    begun = judging.at(first)
    names = [key for key, value in last.items() if key[0] == EXTRA_STATE and value.dtype in FLOATS and key in begun]
    return {key[1]: begun[key] != last[key] for key in names}


def _scaled(judging: Judging) -> bool:
    """Look for a step in which each rank scales its part of the gradients by a number of its own."""
    for op in judging.whole.ops:
        ranks = judging.measured.get(op.index, {})
        if told := scaled_apart(ranks):
            names = sorted({name for each in ranks.values() for name, own in each.gradients.items() if own.sharded})
            detail = "a gradient that each rank scales by its own number"
            _fail(judging, [Difference(Key(op.index, LIVE, PARAMS, name), "bits", mismatched=1, total=1, detail=detail)
                            for name in names], told)  # fmt: skip
            return True
    return False


def _measured(judging: Judging) -> Iterator[str]:
    """Notes on what the steps of the run without a break do and is seldom meant, each with the first step of it."""
    steps = [(op.iteration, op.index) for op in judging.whole.ops if op.kind == "step"]
    for look in (weighed_by_call, same_rows, padding_counts, evaluates):
        of_one_update = [pair for pair in steps if look is not weighed_by_call or not _updates_often(judging, pair[1])]
        calls = (look(judging.model_calls.get(index, {}), step) for step, index in of_one_update)
        yield next(filter(None, calls), "")
    for begins in (KEYS, COPIES):
        yield from (note.removeprefix(f"{begins}: ") for note in judging.notes if note.startswith(f"{begins}: "))
    for of_gradients in (stale, mixed):
        yield next(filter(None, (of_gradients(judging.measured.get(index, {}), step) for step, index in steps)), "")


def _multiplied(judging: Judging) -> str:
    """Make a note on the first step that leaves all parameters about one number times what they were before."""
    for op in judging.whole.ops:
        if op.kind == "step":
            ran = judging.ran.get(op.index, {}).get(0)
            lines = [touch.place for touch in touched(ran) if WRITTEN in touch.done] if ran else []
            told = multiplied(judging.at(op.index - 1), judging.at(op.index), op.iteration, " and ".join(lines[:2]))
            if told:
                return told
    return ""


def _changed_while_scaled(judging: Judging) -> str:
    """A note on the first step in which a line multiplies gradients that still have the loss scale in them."""
    for op in judging.whole.ops:
        ran = judging.ran.get(op.index, {}).get(0) if op.kind == "step" else None
        ranks = judging.measured.get(op.index, {})
        told = changed_while_scaled(ranks, judging.at(op.index - 1), touched(ran), op.iteration) if ran else ""
        if told:
            return told
    return ""


def _updates_often(judging: Judging, op: int) -> bool:
    """Whether an optimizer steps between the backwards of a step, so that no update is made of all of its calls."""
    return any(step.updates > 1 for step in judging.measured.get(op, {}).values())


def _schedule(judging: Judging, last: At) -> str:
    """A note on a rate that moves, or on a schedule under which it is one number in the whole run, with a longer
    program if there is one to try; empty of a rate that stays and has no schedule."""
    steps = [op.index for op in judging.whole.ops if op.kind == "step"]
    seen = [rates_at(judging.measured.get(index, {}).get(0, NOTHING), judging.at(index - 1)) for index in steps]
    if often := _rates_often(judging):
        return often
    if lost := _rate_lost(judging, seen):
        return lost
    rates = {rate for rate in seen if rate}
    every = [{*rate.split(" and ")} for rate in rates]
    program = longer_program(judging.trainer) if judging.scenario.program == ARMS else ""
    if every and {*chain(*every)} > max(every, key=len):  # or an optimizer steps in some of the steps alone
        return schedule_goes_on(len(steps), program) if program else ""
    scheduled = any(role == SCHEDULER and name.endswith(".last_epoch") for role, name in last)
    return schedule_stands_still(max(rates, key=len), len(steps), program) if scheduled and rates else ""


def _rates_often(judging: Judging) -> str:
    """A note on the first step in which a line sets a group's rate several times while an optimizer steps once."""
    for op in judging.whole.ops:
        ran = judging.ran.get(op.index, {}).get(0) if op.kind == "step" else None
        own = judging.measured.get(op.index, {}).get(0)
        if ran and own and sum(own.steps.values()) == 1 and own.backwards > 1:
            told = next(filter(None, map(sets_often, touched(ran))), "")
            if told:
                return f"in step {op.iteration}, in which an optimizer steps once, {told}"
    return ""


def _rate_lost(judging: Judging, used: Sequence[str]) -> str:
    """A note on the first step that does not step with the rates with which it begins, where most of the others do.

    Args:
        used: the rates of each step of the run.
    """
    steps = [op for op in judging.whole.ops if op.kind == "step"]
    begun = [rates_told(judging.at(op.index - 1)) for op in steps]
    apart = [at for at, (one, other) in enumerate(zip(begun, used, strict=True)) if one and other and one != other]
    if not apart or len(apart) * MOST_LOST > len(steps):
        return ""
    return rate_put_back(steps[apart[0]].iteration, begun[apart[0]], used[apart[0]])


MOST_LOST = 3
"""One in how many steps may lose a rate that was set before it; where more do, they set it themselves."""


def _at_rate_zero(judging: Judging) -> str:
    """A note on the first step that changes no parameter, at a learning rate of zero, where others change them."""
    for op in judging.whole.ops:
        before, after = judging.at(op.index - 1), judging.at(op.index)
        params = [key for key in before if key[0] == PARAMS]
        if op.kind == "step" and params and all(before[key] == after.get(key) for key in params):
            zero = sorted(ZERO & rates_in(before))
            return step_at_rate_zero(op.iteration, zero[0].decode().rpartition(" ")[2]) if zero else ""
    return ""


def _updates(judging: Judging, steps: list[int]) -> int:
    """How many updates the optimizer counts in each step or, of one that counts none, how often it steps; 0 where it
    does neither, or not alike."""
    grown = {number for op in steps for _, number in grown_by(COUNT, judging.at(op - 1), judging.at(op))}
    grown = grown or {sum(own.steps.values()) for op in steps for own in judging.measured.get(op, {}).values()}
    return grown.pop() if len(grown) == 1 else 0


def _frozen_at_random(judging: Judging, frozen: Sequence[str]) -> list[str]:
    """Name the frozen parameters that two builds with other seeds make otherwise, unless builds make all of them so."""
    resumed = judging.named(RESUMED)
    builds = [each.first("build") for each in (judging.whole, resumed) if each is not None]
    if len(builds) < 2 or not {*builds} <= {*judging.seen}:
        return []
    one, other = map(judging.at, builds)
    there = [name for name in frozen if (PARAMS, name) in one.keys() & other.keys()]
    found = [name for name in there if one[PARAMS, name] != other[PARAMS, name]]
    return found if len(found) < len(there) else []


def all_seen(judging: Judging, steps: list[int]) -> OfParameters:
    """The kind of gradient that optimizers had of each parameter in any of the steps."""
    return together(judging.gradients.get(op, {}) for op in steps)


def _frozen_moves(judging: Judging, notes: list[str]) -> bool:
    """Look for frozen parameters that a step changes: a failure where an optimizer steps them or fp32 copies of
    them that are no parameters of a module, and otherwise a note, since averages and copies of other parameters are
    moved by hand."""
    for op in judging.whole.ops:
        seen, before, after = judging.gradients.get(op.index, {}), judging.at(op.index - 1), judging.at(op.index)
        frozen = [(PARAMS, name) for name in seen if are_frozen([name], seen)]
        moved = {key[1] for key in frozen if key in before and before[key] != after.get(key)}
        stepped = sorted(moved & {*stepped_frozen(seen)})
        copied = [name for name in sorted(moved) if has_master(name, after, seen)]
        if stepped or copied:
            wrong = stepped or copied
            told = frozen_is_stepped(wrong, op.iteration, copies=not stepped)
            _fail(judging, [not_frozen(name, op.index) for name in wrong], told)
            return True
        notes += [frozen_moves(sorted(moved), op.iteration)] if moved and not notes else []
    return False


def _first_wild(judging: Judging) -> str:
    """A sentence on the first operation of the uninterrupted session after which a value is NaN or infinite."""
    for op in judging.whole.ops:
        own = judging.at(op.index)
        before = judging.at(op.index - 1) if op.index > judging.whole.ops[0].index else {}
        if told := where_first([*own], own, before, None, judging.gradients.get(op.index, {})):
            return f"The first one is there after {wording.at(op)}: {told}."
    return ""


def _no_numbers(judging: Judging, values: At) -> list[str]:
    """The parameters with an element that is NaN or infinite."""
    return [key[1] for key, value in values.items() if key[0] == PARAMS and is_wild(value)]


def _still(judging: Judging, since: int, last: At) -> list[str]:
    """The parameters that are at last what they were after an operation."""
    first = judging.at(since).items()
    return [key[1] for key, value in first if key[0] == PARAMS and value.data and last.get(key) == value]


def _declared_frozen_moves(judging: Judging) -> bool:
    """Look for parameters that change in a step although the trainer says `frozen` of them."""
    declared = judging.trainer.frozen
    for op in judging.whole.ops:
        before, after = judging.at(op.index - 1), judging.at(op.index)
        params = sorted(key for key in before if key[0] == PARAMS and op.kind == "step")
        named = [key for key in params if fits(without_rank(key[1]), declared)]
        moved = [key[1] for key in named if after.get(key) != before[key]]
        if moved:
            seen = judging.gradients.get(op.index, {})
            _fail(judging, [not_frozen(name, op.index) for name in moved],
                  declared_frozen_moves(moved, op.iteration, trainable=not are_frozen(moved, seen)))  # fmt: skip
            return True
    return False


def _uncounted(judging: Judging) -> bool:
    """Look for counts of an optimizer's steps that stay what they are while their parameters move."""
    steps = [op.index for op in judging.whole.ops if op.kind == "step"]
    still = list[str]()
    for role, name in judging.at(steps[0]) if steps else ():
        counts = [judging.at(op).get((role, name)) for op in steps]
        if role == COUNT and None not in counts and all(count == counts[0] for count in counts):
            moves = [judging.at(op - 1).get((PARAMS, name)) != judging.at(op).get((PARAMS, name)) for op in steps]
            still += [name] if sum(moves) >= MOVES else []
    if still:
        differences = [Difference(Key(steps[-1], LIVE, COUNT, name), "bits", mismatched=1, total=1,
                                  detail="the same in every step") for name in still]  # fmt: skip
        _fail(judging, differences, uncounted(still, len(steps)))
    return bool(still)


COUNT = "step"
MOVES = 2
"""How often a parameter has to move for a count that stays to be a mistake: the first step may count from there."""


def _fail(judging: Judging, differences: list[Difference], told: str) -> None:
    judging.differences += differences
    judging.found.append(ArmResult(TRAINS, Verdict.MISMATCH.value, told, ()))


def not_frozen(name: str, op: int) -> Difference:
    """A frozen parameter that an optimizer has stepped, as a difference of the operation."""
    return Difference(Key(op, LIVE, PARAMS, name), "bits", mismatched=1, total=1, detail="frozen, and stepped")


def not_a_number(name: str, op: int) -> Difference:
    """A parameter that is NaN or infinite, as a difference of the operation."""
    return Difference(Key(op, LIVE, PARAMS, name), "bits", mismatched=1, total=1, detail="NaN or infinite")
