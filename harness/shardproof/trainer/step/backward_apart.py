"""Which gradients a backward leaves in two ways to compute the same, before anything is clipped, and which an optimizer
has: so that a clip, after which all of them differ, hides neither which ones it were nor by how much.

*Verifies*: the lengths of the gradients of whole parameters, up to a thousandth. *Does not verify*: their directions,
and parameters of which ranks have other gradients, or one of the ways has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isclose, sqrt

from shardproof.trainer.step.measured import OfStep, squares_of
from shardproof.trainer.step.model_calls import Call
from shardproof.trainer.values.scaled import NEAR

MOST_TOLD = 4

Ranks = Mapping[int, OfStep]


def backward_apart(
    one: Ranks, other: Ranks, names: tuple[str, str], counts: Mapping[str, int], near: float = NEAR, *,
    reshaped: int = 0, common: bool = False,
) -> str:  # fmt: skip
    """A sentence on the gradients of a step, before which both ways have the same parameters; empty where they are
    alike, or where nothing was measured.

    Args:
        one, other: what each rank did in the step. names: of the ways. counts: what there is so and so often in the
            step of the second, which a factor may be. near: up to which share lengths count as alike. reshaped: how
            many parameters were left out, since they have another shape in either way. common: whether only one factor
            of all gradients is told; where each has another, a rank may have its own ones, which are reduced later.
    """
    lengths = [(_lengths(one, after=after), _lengths(other, after=after)) for after in (True, False)]
    factors = [{name: its[name] / mine[name] for name in mine if mine[name] and its.get(name)} for mine, its in lengths]
    left, had = factors
    if not left or left.keys() != had.keys():
        return ""
    apart = [name for name, factor in left.items() if not isclose(factor, 1, rel_tol=near)]
    if not apart:
        scaled = _one(had.values(), near)
        if scaled is None or isclose(scaled, 1, rel_tol=near):
            return ""
        return (
            f"The backward leaves gradients of the same length in both ways, and the optimizer has with {names[1]} "
            f"{scaled:.4g} times what it has with {names[0]}: look at what scales gradients in between."
        )
    factor = _one((left[name] for name in apart), near)
    times = f"{factor:.4g} times as long as with {names[0]}{_count(factor, counts, near)}" if factor else (
        f"of another length than with {names[0]} ({_each(left, apart)})"
    )  # fmt: skip
    if common and factor is None:
        return ""
    every = len(left) == len({name for way in (one, other) for step in way.values() for name in step.gradients})
    if len(apart) == len(left):
        several = f"the {len(left)} gradients" if len(left) > 1 else f"the gradient of {apart[0]}, the only one"
        which = "every gradient" if every and not reshaped else f"{several} that can be held side by side,"
        return f"The backward leaves {which} with {names[1]} {times}."
    which = ", ".join(apart[:MOST_TOLD]) + (f" and {len(apart) - MOST_TOLD} more" if len(apart) > MOST_TOLD else "")
    return (
        f"The backward leaves with {names[1]} the gradients of {len(apart)} of {len(left)} parameters {times}: "
        f"{which}. Those of all others{' that both ways have' * (not every)} are as long in both ways, up to a "
        "thousandth."
    )


def averaged_apart(one: Ranks, other: Ranks, calls: Sequence[Mapping[int, Sequence[Call]]], near: float = NEAR) -> str:
    """A sentence on gradients that are averaged over ranks, of losses that weigh all targets alike in both ways; empty
    where it is not that, or where the loss is no cross-entropy.

    Args:
        one, other: as in `backward_apart`. calls: of the model, in either way, by rank.
    """
    mine, its = (_lengths(way, after=True) for way in (one, other))
    factors = [its[name] / mine[name] for name in mine if mine[name] and its.get(name)]
    factor = _one(factors, near) if factors else None
    ranks = [len(way) for way in calls]
    weights = [sum(weight for own in way.values() for call in own for weight in call.weights) for way in calls]
    known = all(call.weights for way in calls for own in way.values() for call in own) and all(weights)
    if factor is None or not known or not all(ranks) or ranks[0] == ranks[1]:
        return ""
    if not isclose(factor, ranks[0] / ranks[1], rel_tol=near) or not isclose(*weights, rel_tol=near):
        return ""
    return (
        f"The losses of all ranks together weigh their targets alike in both ways, by {weights[0]:.4g} in all, and the "
        "gradients are apart by the number of ranks: what reduces them, such as DistributedDataParallel, divides their "
        "sum by it, which is right of losses that are each a mean of their own, and not of shares of one whole."
    )


def same_lengths(one: Ranks, other: Ranks, near: float) -> bool:
    """Whether the backward is known to leave every gradient as long in the one way as in the other."""
    mine, its = (_lengths(way, after=True) for way in (one, other))
    same = all(isclose(mine[name], its.get(name, -1.0), rel_tol=near) for name in mine)
    return bool(mine) and mine.keys() == its.keys() and same


def without_names(ranks: Ranks, names: Collection[str]) -> Ranks:
    """What each rank did, but for the gradients of some parameters, such as those of another shape in either way."""
    if not names:
        return ranks
    return {
        rank: replace(step, gradients={name: one for name, one in step.gradients.items() if name not in names})
        for rank, step in ranks.items()
    }


def other_lengths(one: Ranks, other: Ranks, near: float) -> bool:
    """Whether the backward is known to leave a gradient of another length in the one way than in the other."""
    mine, its = (_lengths(way, after=True) for way in (one, other))
    return mine.keys() == its.keys() and any(not isclose(mine[name], its[name], rel_tol=near) for name in mine)


def some_come_out_alike(one: Ranks, other: Ranks, near: float) -> bool:
    """Whether optimizers have a gradient of some parameter that is as long in the one way as in the other, which what
    scales the whole loss would have reached too."""
    mine, its = (_lengths(way, after=False) for way in (one, other))
    return any(mine[name] and isclose(mine[name], its.get(name, -1.0), rel_tol=near) for name in mine)


def counts_of(ranks: Ranks, calls: Mapping[int, Sequence[Call]]) -> dict[str, int]:
    """What a step has so and so often."""
    own = calls.get(min(ranks), ()) if ranks else ()
    rows = [len(call.rows) for call in own]
    every = sum(len(call.rows) for each in calls.values() for call in each)
    found = {
        "ranks": len(ranks), "calls of the model on a rank": len(own),
        "rows of a call": rows[0] if len({*rows}) == 1 else 0,
        "rows of a rank": sum(rows), "rows of all ranks": every,
        "targets of a rank": sum(len(call.weights) for call in own),
        "targets of all ranks": sum(len(call.weights) for each in calls.values() for call in each),
    }  # fmt: skip
    return {name: number for name, number in found.items() if number > 1}


def _lengths(ranks: Ranks, *, after: bool) -> dict[str, float]:
    """The length of each parameter's whole gradient."""
    return {name: sqrt(squares) for name, (squares, _) in squares_of(ranks, after=after).items()}


def _one(factors: Iterable[float], near: float) -> float | None:
    """The number that all of the factors are, up to rounding; None where there are several."""
    every = [*factors]
    return every[0] if all(isclose(one, every[0], rel_tol=near) for one in every) else None


def _count(factor: float, counts: Mapping[str, int], near: float) -> str:
    """That a factor, or what it divides by, is the number of something."""
    for text, number in (("", factor), ("one divided by ", 1 / factor)):
        alike = [name for name, count in counts.items() if isclose(number, count, rel_tol=near)]
        if len(alike) > 1:
            return f", which is {text}{number:.4g}, and so many there are of each of these: {', '.join(alike)}"
        if alike:
            return f", which is {text}the number of {alike[0]}"
    return ""


def _each(factors: Mapping[str, float], apart: Sequence[str]) -> str:
    told = ", ".join(f"{name} {factors[name]:.4g} times" for name in apart[:MOST_TOLD])
    return f"{told}, and so on" if len(apart) > MOST_TOLD else told
