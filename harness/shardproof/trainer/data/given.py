"""Which step's data a step was given, against the uninterrupted run.

A run that resumes with the data of another step differs in everything that it computes. What `state()` names of a batch
says whose data they are, and so do digests of what its first module was given (`shardproof.trainer.rank.inputs`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from shardproof.diff import Difference, as_numbers
from shardproof.observe.logical import Value
from shardproof.observe.record import Record
from shardproof.oracle.extra_state import EXTRA_STATE
from shardproof.trainer.arms import GIVEN
from shardproof.trainer.values.every_mesh import OF_A_RANK, Name, is_of_data, rank_of, without_rank
from shardproof.trainer.values.wording import shown

MOST_NUMBERS = 3

UNKNOWN = (
    ": their order is another one, or they are others, such as with other random numbers in them. More `steps` would "
    "tell whether they come later."
)
"""What is said of data that the run without a break was never given."""

Given = Mapping[int, Hashable]
"""Rank → something that is equal where the data are, of one step."""


def given_by_op(records: Iterable[Record]) -> dict[int, dict[int, Hashable]]:
    """Operation → rank → a digest of what the model was given, for each call of the model."""
    found: dict[int, dict[int, Hashable]] = {}
    for record in records:
        if record.role == GIVEN:
            found.setdefault(record.op, {})[record.rank] = tuple(call[0] for call in json.loads(record.data))
    return found


def of_each_call(records: Iterable[Record], place: int) -> dict[int, dict[int, list[Any]]]:
    """Operation → rank → what all of its calls have in a list of theirs, in order. place: of the list in a call."""
    found: dict[int, dict[int, list[Any]]] = {}
    for record in records:
        if record.role == GIVEN:
            calls = json.loads(record.data)
            found.setdefault(record.op, {})[record.rank] = [each for call in calls for each in call[place]]
    return found


def rows_by_op(records: Iterable[Record]) -> dict[int, int]:
    """Operation → how many rows of data the models of all ranks were given; what several ranks, or several
    calls of one, have alike counts once."""
    return _in_all(records, 1, often=False)


def elements_by_op(records: Iterable[Record]) -> dict[int, int]:
    """Operation → how many elements of data the models of all ranks were given; what several ranks have alike counts
    once."""
    return _in_all(records, 8)


def _in_all(records: Iterable[Record], place: int, *, often: bool = True) -> dict[int, int]:
    """Operation → the sum of a number of each call, by its place in a record; a call of several ranks counts once, and
    so does one that a rank makes again with the same data, unless `often`."""
    given: dict[int, Counter[tuple[str, int]]] = {}
    for record in records:
        if record.role == GIVEN:
            given.setdefault(record.op, Counter())
            given[record.op] |= Counter((call[0], call[place]) for call in _of_one_width(json.loads(record.data)))
    return {
        op: sum(number * (times if often else 1) for (_, number), times in calls.items()) for op, calls in given.items()
    }


def _of_one_width(calls: list[list[Any]]) -> list[list[Any]]:
    """The calls whose rows are as long as those of the first, where each length comes equally often with as many rows:
    a frozen module's output, which the next one is given, looks like data. Rows of whole numbers, such as tokens, may
    be of any length."""
    if not calls or calls[0][9]:
        return calls
    widths = [call[8] / max(call[1], 1) for call in calls]
    chained = len({call[1] for call in calls}) == 1 < calls[0][1] and len({*Counter(widths).values()}) == 1
    return [call for call, width in zip(calls, widths, strict=True) if width == widths[0] or not chained]


def rows_apart(steps: Mapping[int, tuple[int, int]], step: int, ways: tuple[str, str], *, alike: bool) -> str:
    """A sentence on how many rows of data two ways were given in a step, where it is not what it was in their first
    step; empty where it is, or nobody knows.

    Args:
        steps: step → rows of either way. alike: whether the ways have the same mesh, so that their first steps should
            have been given as many rows, too.
    """
    one, other = steps.get(step, (0, 0))
    first = min(steps, default=step)
    begun = steps.get(first, (0, 0)) if first < step else (1, 1) if alike else (0, 0)
    if not (one and other and all(begun)) or one * begun[1] == other * begun[0]:
        return ""
    before = f", and in step {first} {begun[0]} and {begun[1]}" if first < step else ""
    return (
        f"The data differ: in step {step} the model was given {one} different rows with {ways[0]} and {other} with "
        f"{ways[1]}{before}: look at which samples count for which update, and at those that are left over."
    )


def by_values(values: Mapping[Name, Value]) -> Given:
    """By tensors of the trainer's own that are data by their name."""
    found: dict[int, list[tuple[str, Value]]] = {}
    for name, value in sorted(values.items()):
        if name[0] == EXTRA_STATE and value.dtype != "utf8" and is_of_data(name):
            found.setdefault(rank_of(name[1]), []).append((without_rank(name[1]), value))
    return {rank: tuple(every) for rank, every in found.items()}


def other_data(given: Given, step: int, steps: Mapping[int, Given]) -> str:
    """A sentence on a step that was given other data than the same step of the uninterrupted run; empty where it was
    given the same, or nobody could read it.

    Args:
        given: of the step. steps: step → what the uninterrupted run was given in it.
    """
    own = steps.get(step, {})
    apart = sorted(rank for rank in given.keys() & own.keys() if given[rank] != own[rank])
    if not apart:
        return ""
    rank = apart[0]
    whose = "the model was given" if rank < 0 or len(own) == 1 else f"rank {rank} was given"
    told = f"The data differ: in step {step} {whose} what"
    for number in sorted(steps, key=lambda one: abs(one - step)):
        for other, seen in sorted(steps[number].items()):
            if seen == given[rank]:
                who = "it" if other == rank else f"rank {other}"
                return f"{told} {who} was given in step {number} of the uninterrupted run{_so(number, step)}."
    if part := _in_part(given[rank], own[rank], steps):
        calls, due = (len(each) if isinstance(each, tuple) else 0 for each in (given[rank], own[rank]))
        count = f"; the model was called {calls} times in it, and {due} in that run" if calls != due else ""
        return f"{told.removesuffix(' what')} {part}{count}."
    return f"{told} it was given in no step of the uninterrupted run{UNKNOWN}"


def numbers_of_loaders(found: Iterable[Difference]) -> str:
    """A sentence on the numbers and random states of loaders and samplers that differ beside the data; empty where
    there are none."""
    told = list[str]()
    for one in found:
        name = one.key.role, without_rank(one.key.fqn)
        if one.key.role in OF_A_RANK and is_of_data((EXTRA_STATE, name[1])):
            told.append(f"the random state of {name[1]} is another one")
        elif is_of_data(name) and one.kind == "bits" and one.expected_first and one.observed_first:
            told.append(f"{name[1]} is {shown(one.observed_first)}, and should be {shown(one.expected_first)}")
    few = list(dict.fromkeys(told))[:MOST_NUMBERS]
    return f"Not alike besides: {'; '.join(few)}." if few else ""


def _in_part(given: Hashable, own: Hashable, steps: Mapping[int, Given]) -> str:
    """Where the uninterrupted run has what a step was given first, of one that calls its model several times; empty
    where it has it nowhere, the model was called once, or it was given the same first."""
    if not isinstance(given, tuple) or not given or (isinstance(own, tuple) and own[:1] == given[:1]):
        return ""
    for number, ranks in sorted(steps.items()):
        for seen in ranks.values():
            if isinstance(seen, tuple) and len(seen) > 1 and given[0] in seen:
                place = seen.index(given[0]) + 1
                return f"first what the uninterrupted run was given in call {place} of its model in step {number}"
    return ""


def _so(number: int, step: int) -> str:
    if number == step:
        return ""
    if number < step:
        return ": these samples come once more"
    return f": the samples of step {step} are left out"


def of_another_step(given: Given, step: int, steps: Mapping[int, Given], ways: tuple[str, str]) -> str:
    """A sentence on a step that one of two ways was given the data of another step of the other's; empty where it was
    given what the other way was given in that step, on whatever rank, or nobody knows.

    Args:
        given: of the second way in the step. steps: step → what the first way was given in it. ways: their names.
    """
    there = set(steps.get(step, {}).values())
    for rank, own in sorted(given.items()):
        for number, ranks in sorted(steps.items()):
            other = next((other for other, seen in sorted(ranks.items()) if seen == own), None)
            if there and own not in there and other is not None and number != step:
                return (
                    f"The data differ: in step {step} rank {rank} was given with {ways[1]} what rank {other} was given "
                    f"in step {number} with {ways[0]}: look at the order of the samples."
                )
    return ""


def repeats(steps: Mapping[int, Given]) -> str:
    """A note on data that come again in the same order, as those of a second epoch that is not shuffled anew."""
    numbers = sorted(steps)
    seen = [tuple(sorted(steps[number].items())) for number in numbers]
    for period in range(2, len(seen)):
        if all(seen) and len(set(seen[:period])) == period and seen[period:] == seen[: len(seen) - period]:
            return (
                f"step {numbers[period]} was given the data of step {numbers[0]} again, and what follows is in the "
                "same order: if a new epoch begins there, it is not shuffled anew"
            )
    return ""


def always_the_same(steps: Mapping[int, Given]) -> str:
    """A note on data of which every step is given the same; empty where it is not, or of few steps."""
    seen = [tuple(sorted(steps[number].items())) for number in sorted(steps)]
    if len(seen) <= LEAST_STEPS or not seen[0] or len({*seen}) > 1:
        return ""
    return (
        f"all {len(seen)} steps are given the same data, though they come from a loader or a generator: look at where "
        "it begins anew, and at what shuffles it"
    )


LEAST_STEPS = 2
"""So few steps may be given the same by chance."""


def data_apart(one: Mapping[Name, Value], other: Mapping[Name, Value], ways: tuple[str, str]) -> str:
    """A sentence on the first tensor of data that two ways do not have alike, also one that every rank has for itself;
    empty where there is none.

    Args:
        ways: how the two are called, such as `pad=eos` and `pad=0`.
    """
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        if not is_of_data(name) or "utf8" in (a.dtype, b.dtype) or a == b:
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            shapes = f"{list(a.shape)} with {ways[0]} and {list(b.shape)} with {ways[1]}"
            return f"The data differ: {name[1]} has the shape {shapes}."
        apart = np.flatnonzero(as_numbers(a) != as_numbers(b))
        if len(apart):
            mine, its = (as_numbers(value)[apart[0]] for value in (a, b))
            place = [int(part) for part in np.unravel_index(apart[0], a.shape or (1,))]
            return f"The data differ: {name[1]} at {place} is {mine} with {ways[0]} and {its} with {ways[1]}."
    return ""
