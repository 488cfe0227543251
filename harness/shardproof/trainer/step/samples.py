"""What the loss makes of each sample in two ways to compute the same: the gradient that comes back to the output of the
model (`shardproof.trainer.rank.inputs`), with samples told by their bits, whatever call and rank has them.

Where both ways have the same parameters, a sample's gradient at the output says how the loss weighs it. A loss that is
divided by each micro-batch's own count of tokens weighs the samples of one call alike, and those of another otherwise.

*Verifies*: that the gradients of a call's samples are those of the other way times one number, up to a thousandth.
*Does not verify*: which of the two ways is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2

from shardproof.observe.record import Record
from shardproof.trainer.arms import GIVEN
from shardproof.trainer.values.scaled import NEAR

MOST_TOLD = 4


@dataclass(frozen=True)
class Sample:
    """rank, call: which call of the model on which rank has the sample. gradient: its size at the output, with a sign;
    None where no backward came. zeroed: the line that set what it made to zero before an optimizer stepped."""

    rank: int
    call: int
    gradient: float | None
    zeroed: str = ""


Samples = Mapping[str, Sample]
"""Digest → sample, of a step. A digest that comes twice is left out, since nobody knows which is which."""


def samples_by_op(records: Iterable[Record]) -> dict[int, Samples]:
    """The samples of the ranks by the number of the operation, as the records of given data have them."""
    found: dict[int, dict[str, list[Sample]]] = {}
    for record in records:
        if record.role != GIVEN:
            continue
        own = found.setdefault(record.op, {})
        for call, (_, _, digests, gradients, zeroed, *_) in enumerate(json.loads(record.data)):
            for place, digest in enumerate(digests):
                value = gradients[place] if gradients else None
                own.setdefault(digest, []).append(Sample(record.rank, call, value, zeroed))
    return {op: {digest: each[0] for digest, each in own.items() if len(each) == 1} for op, own in found.items()}


def weighed_apart(one: Samples, other: Samples, names: tuple[str, str], *, common: bool = True) -> str:
    """A sentence on samples that two ways weigh otherwise in a step; empty where they weigh all alike, or by no number
    that calls have in common.

    Args:
        one, other: of the step. names: of the ways, such as `micro=4` and `micro=1`. common: whether one factor for
            all samples is told; what the backward leaves may be alike all the same, as where ranks are averaged.
    """
    both = [(one[digest], other[digest]) for digest in one if digest in other]
    if len(both) < 2 or not any(mine.gradient for mine, _ in both) or not any(its.gradient for _, its in both):
        return ""
    for place, (way, has) in enumerate((names, names[::-1])):
        zeroed = [pair[place] for pair in both if pair[place].zeroed and not pair[1 - place].zeroed]
        if zeroed:
            return (
                f"With {way} what the backward made of {len(zeroed)} of {len(both)} samples is set to zero before an "
                f"optimizer steps ({zeroed[0].zeroed}), and with {has} it is not."
            )
    for place, (way, has) in enumerate((names, names[::-1])):
        lost = [pair for pair in both if not pair[place].gradient and pair[1 - place].gradient]
        if lost:
            return (
                f"With {way} no gradient comes back to {len(lost)} of {len(both)} samples, and with {has} it does: "
                "look at which samples count in the loss."
            )
    ratios = [(its, its.gradient / mine.gradient) for mine, its in both if mine.gradient and its.gradient]
    factors = _by_call(ratios)
    if factors is None:
        return ""
    values = {round(factor, 9) for factor in factors.values()}
    if max(values) - min(values) <= NEAR * max(map(abs, values)):
        factor = next(iter(factors.values()))
        if abs(factor - 1) <= NEAR or not common:
            return ""
        look = "look at the number that the loss is divided by"
        if abs(factor - _of_meshes(names)) <= NEAR * factor:
            look = f"right where ranks average what each makes of its own samples, and otherwise {look}"
        elif _is_a_scale(factor):
            look = f"right of a loss scale that is taken out again before gradients are clipped, and otherwise {look}"
        return (
            f"The gradient that the loss hands to the model's output is with {names[1]} {factor:.4g} times that with "
            f"{names[0]}, for every sample: {look}."
        )
    told = ", ".join(f"{factor:.4g} times in call {call + 1} on rank {rank}" for (rank, call), factor in
                     sorted(factors.items())[:MOST_TOLD])  # fmt: skip
    return (
        f"The loss weighs samples otherwise: the gradient that it hands to the model's output is with {names[1]} that "
        f"with {names[0]} {told}. So each call's loss is scaled by a number of its own, such as one divided by its "
        "count of samples or tokens, where the whole batch's is right."
    )


def _is_a_scale(factor: float) -> bool:
    """Whether a factor, or one divided by it, is a large power of two, as loss scales are."""
    power = round(log2(factor)) if factor > 0 else 0
    return abs(power) >= LEAST_SCALE and abs(factor - 2.0**power) <= NEAR * factor


LEAST_SCALE = 7
"""The exponent of the smallest power of two that is taken for a loss scale."""


def _of_meshes(names: tuple[str, str]) -> float:
    """How many times as many ranks the second way has; 0 where they do not differ in that."""
    numbers = [name.removeprefix("mesh=") for name in names]
    return int(numbers[1]) / int(numbers[0]) if all(map(str.isdecimal, numbers)) else 0.0


def _by_call(ratios: Iterable[tuple[Sample, float]]) -> dict[tuple[int, int], float] | None:
    """Rank and call → the number that all of its samples have; None where a call's samples have several."""
    found: dict[tuple[int, int], float] = {}
    for sample, ratio in ratios:
        known = found.setdefault((sample.rank, sample.call), ratio)
        if abs(ratio - known) > NEAR * abs(known):
            return None
    return found


def zeroed_before(samples: Samples, step: int) -> str:
    """A note on gradients of a step that are set to zero before an optimizer steps; empty where none are."""
    zeroed = [sample for sample in samples.values() if sample.zeroed]
    if not zeroed:
        return ""
    return (
        f"what the backward made of {len(zeroed)} of {len(samples)} samples of step {step} is set to zero before an "
        f"optimizer steps ({zeroed[0].zeroed}): right where a scaler skips the step, or where "
        "another optimizer's turn begins, as in a GAN"
    )
