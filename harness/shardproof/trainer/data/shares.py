"""Which samples the ranks of one run have in common: in a step that a run without a break gives each rank other samples
in, and over several steps, as where each rank shuffles with a seed of its own and takes its share of that order.

Ranks that a model is sharded over by tensor parallelism are all given the same, in each step; of those nothing is said.

*Verifies*: that samples are the same, by their bits. *Does not verify*: that two samples with the same bits are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from shardproof.observe.record import Record
from shardproof.trainer.data.given import of_each_call

OfRanks = Mapping[int, Sequence[str]]
"""Rank → digests of the samples that it was given in a step, in order."""

_SAMPLES = 2
"""The place of a call's samples in a record."""

LEAST = 2
"""So few samples in common may be alike by chance."""


def shares_by_op(records: Iterable[Record]) -> dict[int, dict[int, list[str]]]:
    """Operation → rank → digests of the samples that its models were given, in order."""
    return of_each_call(records, _SAMPLES)


def in_common(own: OfRanks, steps: Mapping[int, OfRanks], step: int) -> str:
    """A sentence on samples that two ranks are both given in a step, where no step of the run without a break gives two
    ranks the same; empty where they are given others, or that run has such a step.

    Args:
        own: of the step. steps: step → what the ranks of the run without a break were given. step: the number.
    """
    if any({*one} & {*other} for each in steps.values() for one, other in combinations(each.values(), 2)):
        return ""
    for one, other in combinations(sorted(own), 2):
        common = {*own[one]} & {*own[other]}
        if common:
            number = "all" if common == {*own[one]} == {*own[other]} else str(len(common))
            return (
                f"In step {step} ranks {one} and {other} are given {number} of their samples in common, and in no step "
                "of the uninterrupted run: look at what gives each rank its share of the data when they go on."
            )
    return ""


def shares_overlap(steps: Mapping[int, OfRanks]) -> str:
    """A note on samples that two ranks were given in different steps before either was given one of its own again;
    empty where they were given none, the same in each step, or nobody knows.

    Args:
        steps: step → what the ranks of one run were given.
    """
    ranks = sorted({rank for each in steps.values() for rank in each})
    for one, other in combinations(ranks, 2):
        seen: dict[int, list[str]] = {one: [], other: []}
        begun = 0
        for step in sorted(steps):
            mine, its = (steps[step].get(rank, ()) for rank in (one, other))
            if not mine or not its or {*mine} & {*its}:
                break  # a step whose samples both have says nothing of shares
            if {*mine} & {*seen[one]} or {*its} & {*seen[other]}:
                break  # a new epoch may give a rank what another one had
            seen[one] += mine
            seen[other] += its
            begun += 1
        common = {*seen[one]} & {*seen[other]}
        if len(common) >= LEAST:
            return (
                f"ranks {one} and {other} were given {len(common)} of the same samples in the first {begun} steps, in "
                "which neither was given one of its own twice: if each is to have its own share of an epoch, look at "
                "the seed and at the order that each rank takes its share from"
            )
    return ""
