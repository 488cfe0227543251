"""In which epoch, and at which place in it, a step has its samples, by their bits alone.

A new epoch begins with the first step of whose samples its epoch has had more than half already: all of them, but for
those that an epoch leaves out at its end. Ranks whose data overlap have less in common. A resumed run whose
samples are those of the same place in an earlier epoch has lost which epoch it is in, or the random state that
shuffles; one whose samples are those of another place in the same epoch has lost its place.

*Verifies*: that a step's samples are exactly those of the step that is named, over all ranks. *Does not verify*: an
epoch in which a sample comes twice, or whose last batch is filled with samples of the next one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

OfSteps = Mapping[int, Collection[str]]
"""Step → digests of the samples that the ranks were given in it."""

NOT_ITS_PLACE = "the order is right, and the place in it is not restored"
"""What is told of a resumed run that is given the data of another step of the same epoch."""


def epochs_of(steps: OfSteps) -> dict[int, tuple[int, int]]:
    """Step → number of its epoch and of the step in it, both from 0."""
    found: dict[int, tuple[int, int]] = {}
    seen, epoch, place = set[str](), 0, 0
    for step in sorted(steps):
        own = {*steps[step]}
        if len(seen & own) * 2 > len(own):
            seen, epoch, place = set(), epoch + 1, 0
        found[step] = epoch, place
        seen |= own
        place += 1
    return found


def other_place(given: Collection[str], step: int, steps: OfSteps, resumed: int = -1) -> str:
    """A sentence on the epoch, or the place in it, that a step was given the samples of; empty where they are those of
    the step itself, or of none, or where the run has one epoch only.

    Args:
        given: what the step was given. steps: what the uninterrupted run was given. resumed: the first step behind the
            load, of a resumed run.
    """
    places = epochs_of(steps)
    due = places.get(step)
    same = [other for other in steps if given and {*steps[other]} == {*given}]
    if due is None or not due[0] or step in same or not same:
        return ""
    there = next((places[other] for other in same if places[other][1] == due[1]), None)
    here = f"In the uninterrupted run step {step} is step {due[1]} of epoch {due[0]}, and these are the samples of"
    if there is not None:
        return (
            f"{here} the same place in epoch {there[0]}: the number of the epoch, or the random state that shuffles "
            "it, is not restored, or does not reach what shuffles."
        )
    other = min(same, key=lambda one: abs(one - step))
    epoch, place = places[other]
    begun = places.get(resumed, (0, 0))[1]
    if not due[1] and begun and any(places[one][1] == begun for one in same):
        return (
            f"{here} step {begun} of an epoch, at which place the resume began: what was skipped there is skipped in "
            f"the new epoch again, so that the first {begun} of its steps never come."
        )
    if epoch == due[0]:
        return f"{here} step {place} of it: {NOT_ITS_PLACE}."
    return f"{here} step {place} of epoch {epoch}."


OfRanks = Mapping[int, Collection[str]]
"""Rank → digests of the samples that it was given in a step."""


def ends_apart(steps: Mapping[int, OfRanks]) -> str:
    """A sentence on the first step in which some ranks are given samples that have come already in this epoch while
    others are given new ones, as where ranks have not the same number of them; empty where all have new ones or none.

    Args:
        steps: what the ranks were given in each step of the uninterrupted run.
    """
    seen = set[str]()
    for step in sorted(steps):
        again = sorted(rank for rank, own in steps[step].items() if own and seen >= {*own})
        new = sorted(rank for rank, own in steps[step].items() if own and not seen & {*own})
        if again and new:
            return (
                f"In step {step} of the uninterrupted run rank {again[0]} was given samples that had come already, and "
                f"rank {new[0]} new ones: where ranks do not come to the end of an epoch in the same step, one number "
                "for all of them does not say in which epoch, and where in it, each is. Look at how many samples of "
                "an epoch each rank is given."
            )
        if again:
            seen = set()
        seen |= {sample for own in steps[step].values() for sample in own}
    return ""


def first_epoch_alone(steps: OfSteps, saved: int, *, tried: bool = False) -> str:
    """A note that the save lies in the first epoch, so that a resume in a later one is not tried; empty where it does
    not, or where nobody knows what the steps were given.

    Args:
        steps: of the run without a break. saved: the step behind which the save comes. tried: whether that has been
            put off already, to come to a later epoch.
    """
    places = epochs_of(steps)
    if not all(steps.values()) or places.get(saved, (1, 0))[0]:
        return ""
    length = next((step for step, (epoch, _) in sorted(places.items()) if epoch), 0)  # 0: its end is not reached
    ends = f", which ends with step {length - 1}" if length else ""
    more = 4 * (saved + 1)
    into = max(1, length // 2)
    before, after = (length + into, length + 2 * into) if length else (more, more)
    would = "would try it" if length else "may try it, and so may a shorter data set"
    how = "a shorter data set would try it" if tried else f"`--program 'arms {before} {after}'` {would}"
    lies = (
        f"the save comes in the first epoch of the data{ends}: a resume in a later one is not tried" if length else
        "no sample comes twice in the run, so that all of it seems to lie in the first epoch of the data: a resume in "
        "a later one is not known to be tried"
    )  # fmt: skip
    return f"{lies}, where another order or another place may be lost; {how}"


def later_program(notes: Iterable[str]) -> str:
    """The program that the first note with one proposes, such as that of `first_epoch_alone`; with the sessions of a
    resume and of `alike`, if it names none. Empty where no note has one."""
    named = r"`--program '(arms \d+ \d+)((?: [a-z-]+)*)'`"
    found = next(filter(None, (re.search(named, note) for note in notes)), None)
    return f"{found[1]}{found[2] or ' twice resumed second-resume alike'}" if found else ""
