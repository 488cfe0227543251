"""What two sessions may have otherwise without any effect: random states that nothing is made of, and what of a loader
is there in one process and not in another.

*Verifies*: that all else is the same, after each step that the two share. *Does not verify*: steps beyond those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardproof.diff import Difference
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.trainer.arms import Session
from shardproof.trainer.judge.judging import Judging
from shardproof.trainer.judge.whose_data import data_of
from shardproof.trainer.lines.lines_apart import MADE, TOUCH, Parting, apart_in
from shardproof.trainer.values.every_mesh import OF_A_RANK, Name, Values, is_of_data, without_rank
from shardproof.trainer.values.notes import (
    counted_steps,
    differ_already,
    never_drawn,
    of_each_step,
    of_loaders,
    without_effect,
)

SCHEDULER, STEP_COUNT = "scheduler", "_step_count"
"""The role of a schedule, and the count by which torch warns of calls in the wrong order, and nothing else."""


def harmless(judging: Judging, session: Session, other: Session, saved: int = -1) -> tuple[set[Name], list[str]]:
    """What need not be compared between two sessions, and notes that say so. saved: the operation that the load is
    compared with, if it is not the first save.

    A loader that has been set to a place in its data may be wrapped once more, and have other parts therefore. Where
    the model is given the same in every step, that is no difference of the data.
    """
    load = judging.loaded(session)
    steps = list(judging.in_turn(session, other))
    loads = [(judging.saved if saved < 0 else saved, load)] if load >= 0 else []
    pairs = [(judging.at(one), judging.at(its)) for one, its in loads + steps]
    given = [(judging.given.get(one), judging.given.get(its)) for one, its in steps]
    loaders = set[Name]()
    if given and all(one and one == its for one, its in given):
        made = set(pairs[0][0]) if loads else set[Name]()
        made = {name for name in made if is_of_a_loader(name) and pairs[0][0][name] != pairs[0][1].get(name)}
        made = {name for name in made if all(one.get(name) == its.get(name) for one, its in pairs[1:])}
        loaders = made | {name for one, its in pairs for name in one.keys() ^ its.keys() if is_of_a_loader(name)}
    counts, anew = counts_alone(pairs), made_anew(pairs) if loads else set()
    notes = [*([of_loaders(loaders)] if loaders else []), *([counted_steps(counts)] if counts else [])]
    notes += [of_each_step(anew)] if anew else []
    return loaders | counts | anew, notes


def made_anew(pairs: Sequence[tuple[Values, Values]]) -> set[Name]:
    """Tensors of the trainer's own that one of two sessions has not right after a load, and that are alike after each
    step, as those that a step makes and leaves on the trainer. pairs: after the load, and after each step."""
    (one, other), *steps = pairs
    apart = {name for name in one.keys() ^ other.keys() if name[0] == EXTRA_STATE}
    tensors = {name for name in apart if (one.get(name) or other[name]).dtype != "utf8"}
    return {name for name in tensors if steps and all(a.get(name) == b.get(name) is not None for a, b in steps)}


def counts_alone(pairs: Sequence[tuple[Values, Values]]) -> set[Name]:
    """Counts of a schedule's calls that differ where nothing else of the schedule does."""
    apart = {name for one, its in pairs for name in one.keys() & its.keys() if one[name] != its[name]}
    counts = {name for name in apart if name[0] == SCHEDULER and name[1].endswith(STEP_COUNT)}
    return {name for name in counts if not any(_beside(name, one) for one in apart - counts)}


def of_loaders_elsewhere(expected: Values, observed: Values) -> set[Name]:
    """What of a loader is there on one mesh and not on another, as a sampler that shares data out among ranks."""
    return {name for name in expected.keys() ^ observed.keys() if is_of_data(name)}


def beside_random_states(
    judging: Judging, session: Session, other: Session, found: list[Difference], leave: Iterable[Name]
) -> tuple[list[Difference], list[str]]:
    """What two sessions differ in, and a note. Where it is generators alone, and all that later steps make of them is
    the same, it is the note, also of generators that a load does not restore; where later steps are given other data,
    it is what differs then, also where the first that differs is what a loader says of itself, and that is the note.
    What had no effect is kept in `without_effect`: the sessions that are judged after it leave it out of what they
    compare, since they may have no step left to show it."""
    own = {(one.key.role, one.key.fqn) for one in found}
    *early, last = [op.index for op in session.ops if op.kind == "step"] or [-1]
    random = all(role in OF_A_RANK for role, _ in own)
    beside = all(role in OF_A_RANK or is_of_a_loader((role, name)) for role, name in own)
    if not early or not own or not beside or found[0].key.op >= last:
        return found, []
    every = own | {(key.role, key.fqn) for key in judging.observed if key.role in OF_A_RANK}
    between, looked_at = judging.between, judging.looked_at
    later = judging.steps_differ(session, other, {*leave, *every}, rounds=True)
    if random and not later and judging.looked_at > looked_at:
        judging.without_effect |= own
        return [], [without_effect(own)]
    if later and data_of(judging, session, later):
        return later, [differ_already(own)]
    if random and later and not _draws(judging, session, other, later[0].key.op):
        judging.without_effect |= own
        return later, [never_drawn(own)]
    judging.between = between
    return found, []


def random_before(early: Sequence[Difference], found: Sequence[Difference], data: str) -> list[Difference]:
    """The random states among what two sessions differed in before a step that is given other data.

    Args:
        early: what they differ in first. found: what they differ in at the step. data: that it is given other data.
    """
    apart = {(one.key.role, one.key.fqn) for one in found} != {(one.key.role, one.key.fqn) for one in early}
    return [one for one in early if one.key.role in OF_A_RANK] if data and apart else []


def _draws(judging: Judging, session: Session, other: Session, until: int) -> bool:
    """Whether random numbers may have had an effect on what two sessions do up to an operation of the first: models
    draw some, or are given other data, or nobody knows."""
    for there, here in judging.in_turn(session, other):
        given = judging.given.get(there), judging.given.get(here)
        calls = [call for op in (there, here) for own in judging.model_calls.get(op, {}).values() for call in own]
        if not given[0] or given[0] != given[1] or not calls or any(call.draws for call in calls):
            return True
        parted = apart_in(judging.ran.get(there, {}), judging.ran.get(here, {}))
        if parted and _may_be_drawn(parted[1]):
            return True
        if here >= until:
            break
    return False


def _may_be_drawn(parting: Parting) -> bool:
    """Whether two runs part where numbers may be drawn outside of models, as a mask between two of them, or noise that
    is added to gradients."""
    noise = parting.kind == TOUCH and parting.first is not None and parting.first.path == "gradients"
    return parting.kind == MADE or (noise and parting.one is not None and ".backward(" not in parting.one.text)


def is_of_a_loader(name: Name) -> bool:
    """Whether a value, or a generator, hangs on a loader by its name."""
    return is_of_data(name) or (name[0] in OF_A_RANK and is_of_data(("extra_state", without_rank(name[1]))))


def _beside(count: Name, other: Name) -> bool:
    """Whether a value is of the same schedule as a count."""
    return other[0] == SCHEDULER and other[1].startswith(count[1].removesuffix(STEP_COUNT))
