"""What the model of each rank was called with in a step, and what is seldom meant of it: targets that weigh otherwise
in one call than in another, ranks that are given the same samples, and a model that trains in evaluation mode.

*Verifies*: what gradients came back to the outputs. *Does not verify*: which weights and samples are meant; it is told,
and not judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardproof.observe.record import Record
from shardproof.trainer.arms import GIVEN
from shardproof.trainer.values.scaled import NEAR

MOST_TOLD = 3


@dataclass(frozen=True)
class Call:
    """A call of the model. rows: digests of its samples. weights: of each of its targets in a cross-entropy, by which
    the loss weighs it. evaluates: whether the model's `training` is False. draws: whether it draws random numbers.
    padded: the class that fills up rows among the targets, how many of them, and of how many; empty of none."""

    rows: tuple[str, ...]
    weights: tuple[float, ...]
    evaluates: bool
    draws: bool = False
    padded: tuple[int, ...] = ()


def model_calls_by_op(records: Iterable[Record]) -> dict[int, dict[int, list[Call]]]:
    """Operation → rank → the calls of its model through which gradients went."""
    found: dict[int, dict[int, list[Call]]] = {}
    for record in records:
        if record.role == GIVEN:
            told = json.loads(record.data)
            calls = [
                Call(tuple(rows), tuple(weights), evaluating, draws, tuple(padded))
                for _, _, rows, gradients, _, weights, evaluating, draws, _, _, padded in told
                if gradients
            ]
            found.setdefault(record.op, {})[record.rank] = calls
    return found


def weighed_by_call(ranks: Mapping[int, Sequence[Call]], step: int) -> str:
    """A note on targets of a cross-entropy that the loss weighs otherwise in one call of the model than in another;
    empty where it weighs all alike, or where there is no cross-entropy."""
    by_call = {
        (rank, number): call.weights for rank, calls in sorted(ranks.items()) for number, call in enumerate(calls)
    }
    each = {place: weights[0] for place, weights in by_call.items() if weights and near(weights)}
    if len(each) < 2 or len(each) < len(by_call) or near(each.values()):
        return ""
    if not near(weight * len(by_call[place]) for place, weight in each.items()):
        return _by_rank(each, by_call, step)
    told = ", ".join(
        f"{_targets(len(by_call[rank, call]))} of call {call + 1} on rank {rank} "
        f"{_each(weight, len(by_call[rank, call]))}"
        for (rank, call), weight in [*each.items()][:MOST_TOLD]
    )
    more = f" and so on for {len(each)} calls" if len(each) > MOST_TOLD else ""
    return (
        f"in step {step} the loss weighs {told}{more}: it is a mean in each call, so that a target counts more where "
        "there are few; one mean over all targets of the step needs their number on all ranks and in all calls"
    )


def _by_rank(
    each: Mapping[tuple[int, int], float], targets: Mapping[tuple[int, int], Sequence[float]], step: int
) -> str:
    """A note that the loss is a mean on each rank, whose targets weigh the same in all however many there are; empty
    where it is not."""
    weights, numbers = dict[int, float](), dict[int, int]()
    for place, weight in each.items():
        if not near((weights.setdefault(place[0], weight), weight)):
            return ""
        numbers[place[0]] = numbers.get(place[0], 0) + len(targets[place])
    if len({*numbers.values()}) < 2 or not near(weights[rank] * number for rank, number in numbers.items()):
        return ""
    told = ", ".join(
        f"{_targets(numbers[rank])} of rank {rank} {_each(weights[rank], numbers[rank])}" for rank in numbers
    )
    return (
        f"in step {step} the loss weighs {told}: it is a mean on each rank, so that a target counts more where a rank "
        "has few; one mean over all targets of the step needs their number on all ranks"
    )


def same_rows(ranks: Mapping[int, Sequence[Call]], step: int) -> str:
    """A note on ranks whose models are given the same samples; empty where they are not."""
    rows = {rank: [call.rows for call in calls] for rank, calls in ranks.items() if any(call.rows for call in calls)}
    groups: dict[str, list[int]] = {}
    for rank, own in sorted(rows.items()):
        groups.setdefault(json.dumps(own), []).append(rank)
    alike = next((each for each in groups.values() if len(each) > 1), None)
    if alike is None:
        return ""
    return (
        f"in step {step} the models of ranks {', '.join(map(str, alike))} are given the same samples: right where they "
        "share out one model, as in tensor parallelism, and otherwise each of them should have its own"
    )


def padding_counts(ranks: Mapping[int, Sequence[Call]], step: int) -> str:
    """A note on targets that fill up rows, and that the loss weighs as it does the others; empty where none do."""
    for rank, calls in sorted(ranks.items()):
        for call in calls:
            if call.padded and call.weights and near(call.weights):
                filling, number, of = call.padded
                return (
                    f"in step {step} {number} of the {of} targets on rank {rank} are class {filling} at the ends of "
                    "rows, which nothing else is, and weigh as much as the others: if that is padding, the loss counts "
                    "it; look for `ignore_index`, or a mask"
                )
    return ""


def evaluates(ranks: Mapping[int, Sequence[Call]], step: int) -> str:
    """A note on models that train in evaluation mode; empty where they do not."""
    if not any(call.evaluates for calls in ranks.values() for call in calls):
        return ""
    return (
        f"in step {step} the model's `training` is False while gradients go through it, so that neither dropout nor "
        "the statistics of a batch norm do anything: look at an `eval()` without a `train()` after it"
    )


def loss_of(ranks: Mapping[int, Sequence[Call]], updates: int) -> str:
    """By what a cross-entropy weighs the targets of each rank; empty where the loss is none. updates: of the step."""
    weights = {rank: [weight for call in own for weight in call.weights] for rank, own in sorted(ranks.items()) if own}
    if not weights or not all(call.weights for own in ranks.values() for call in own):
        return ""
    if any(abs(sum(own)) <= NEAR * sum(map(abs, own)) for own in weights.values()):
        return ""  # such as advantages, which come to zero
    if any(min(own) < 0 < max(own) for own in weights.values()):
        return ""  # no mean of a cross-entropy
    each = {rank: f"{_targets(len(own))} of rank {rank} by {sum(own):.4g}" for rank, own in weights.items()}
    if len({text.partition(" of rank ")[0] for text in each.values()}) > 1:
        return f"a cross-entropy, which weighs in all {', '.join([*each.values()][: MOST_TOLD + 1])}"
    return f"a cross-entropy, which weighs in all {each[min(each)]}; {_of_a_mean(updates)}"


def _of_a_mean(updates: int) -> str:
    if updates < 2:
        return "a mean of them weighs 1"
    return f"a mean in each of the {updates} backwards, behind which an optimizer steps, weighs 1, and in all {updates}"


def near(values: Iterable[float]) -> bool:
    """Whether all are the same number but for rounding."""
    every = [*values]
    return max(every) - min(every) <= NEAR * max(map(abs, every))


def _each(weight: float, number: int) -> str:
    return f"by {weight:.4g}{' each' if number > 1 else ''}"


def _targets(number: int) -> str:
    return "the target" if number == 1 else f"the {number} targets"


def rows_of(calls: Sequence[Call]) -> str:
    """How many rows the calls have, such as `4 or 6 rows`."""
    numbers = sorted({len(call.rows) for call in calls})
    many = "row" if numbers == [1] else "rows"
    return f"{numbers[0]} {many}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} rows"
