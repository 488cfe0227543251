"""Whose data the steps of a session were given, against the run without a break: those of another step, of another
rank, of another place in the epoch, or the same on several ranks.

*Verifies*: that what models were given is the same, by its bits. *Does not verify*: data that no model is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardproof.diff import Difference
from shardproof.program import Op
from shardproof.trainer.arms import Session
from shardproof.trainer.data.epochs import NOT_ITS_PLACE, ends_apart, other_place
from shardproof.trainer.data.given import (
    UNKNOWN,
    Given,
    always_the_same,
    by_values,
    numbers_of_loaders,
    other_data,
    repeats,
)
from shardproof.trainer.data.packed import cut_elsewhere
from shardproof.trainer.data.shares import OfRanks, in_common, shares_overlap
from shardproof.trainer.judge.judging import Judging, step_of
from shardproof.trainer.lines.lines_of_state import numbers_made
from shardproof.trainer.values.counted import plain_number
from shardproof.trainer.values.every_mesh import is_of_data, without_rank


def data_of(judging: Judging, session: Session, found: Sequence[Difference]) -> str:
    """Whether a session was given other data than the uninterrupted one in the step after which it differs."""
    step = step_of(session, found)
    if step is None:
        return ""
    told = (other_data(given(step.index), step.iteration, _of_steps(judging.whole, given)) for given in _ways(judging))
    data = next(filter(None, told), "")
    if not data:
        return ""
    if data.endswith(UNKNOWN) and (cut := _cut_elsewhere(judging, step)):
        data = f"{data.removesuffix(UNKNOWN)}. {cut}"
    own = {*judging.samples.get(step.index, ())}
    place = other_place(own, step.iteration, samples_of_steps(judging), judging.before)
    place = place and (ends_apart(_samples_of_ranks(judging)) or place)
    twice = in_common(judging.shares.get(step.index, {}), _shares_of_steps(judging), step.iteration)
    load = judging.ran.get(judging.loaded(session), {})
    made = judging.explained(lambda: numbers_made(load, "load")) if NOT_ITS_PLACE in place else ""
    return " ".join(filter(None, (data, twice, place, made, numbers_of_loaders(found))))


def data_repeat(judging: Judging, session: Session) -> str:
    """A note on data that a session is given again in the same order, with the samplers that stay in their epoch."""
    told = next(filter(None, (repeats(_of_steps(session, given)) for given in _ways(judging))), "")
    epochs = _epochs_that_stay(judging, session) if told else []
    if not epochs:
        return told
    return (
        f"{told}; {' and '.join(epochs)} after every step, so look at what should tell the sampler its epoch, as "
        "`set_epoch` does"
    )


def _epochs_that_stay(judging: Judging, session: Session) -> list[str]:
    """The epochs of loaders and samplers that are one number after all steps of a session, such as
    `loader.batch_sampler.epoch is 0`."""
    steps = [judging.at(op.index) for op in session.ops if op.kind == "step"]
    names = [name for name in steps[0] if name[1].endswith(".epoch") and is_of_data(name)] if steps else []
    told = ((name, {plain_number(values, name) for values in steps}) for name in sorted(names))
    return [f"{without_rank(name[1])} is {texts.pop().rpartition(' ')[2]}" for name, texts in told
            if len(texts) == 1 and "" not in texts]  # fmt: skip


def same_data(judging: Judging) -> str:
    """A note on a loader or a generator of which all steps of the uninterrupted run are given the same."""
    return always_the_same(_of_steps(judging.whole, _ways(judging)[0])) if judging.loads_data else ""


def ranks_overlap(judging: Judging) -> str:
    """A note on samples that several ranks of the uninterrupted run were given in different steps."""
    return shares_overlap(_shares_of_steps(judging)) if judging.loads_data else ""


def samples_of_steps(judging: Judging) -> dict[int, set[str]]:
    """Step of the uninterrupted run → digests of its samples."""
    return {op.iteration: {*judging.samples.get(op.index, ())} for op in judging.whole.ops if op.kind == "step"}


def _ways(judging: Judging) -> tuple[Callable[[int], Given], Callable[[int], Given]]:
    """What is known of the data of an operation: what the model was given, and what is data by its name."""
    return lambda op: judging.given.get(op, {}), lambda op: by_values(judging.at(op))


def _cut_elsewhere(judging: Judging, step: Op) -> str:
    """Where the numbers come that the first rank was given in a step."""
    steps = {op.iteration: judging.numbers_given.get(op.index, {}).get(0, []) for op in judging.whole.ops
             if op.kind == "step"}  # fmt: skip
    return cut_elsewhere(judging.numbers_given.get(step.index, {}).get(0, []), step.iteration, steps)


def _samples_of_ranks(judging: Judging) -> dict[int, dict[int, set[str]]]:
    """Step of the uninterrupted run → rank → digests of its samples."""
    found: dict[int, dict[int, set[str]]] = {}
    for op in judging.whole.ops:
        for digest, sample in judging.samples.get(op.index, {}).items() if op.kind == "step" else ():
            found.setdefault(op.iteration, {}).setdefault(sample.rank, set()).add(digest)
    return found


def _shares_of_steps(judging: Judging) -> dict[int, OfRanks]:
    """Step of the uninterrupted run → rank → digests of all of its samples, in order."""
    return {op.iteration: judging.shares.get(op.index, {}) for op in judging.whole.ops if op.kind == "step"}


def _of_steps(session: Session, given: Callable[[int], Given]) -> dict[int, Given]:
    """Step → what a session was given in it. given: the same of an operation."""
    return {op.iteration: given(op.index) for op in session.ops if op.kind == "step"}
