"""What a step of a trainer does, as its ranks measured it: a portrait for whoever knows what it should do, and
sentences on what is seldom meant.

*Verifies*: that each rank multiplies what it holds of a sharded tensor's gradient by the same number. *Does not
verify*: which number that should be, and all else, which is told and not judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt

from shardproof.observe.logical import Value
from shardproof.observe.record import Record
from shardproof.observe.settings import SETTING
from shardproof.trainer.arms import MEASURED
from shardproof.trainer.step.collectives import OfRank, gathered, reduced
from shardproof.trainer.step.model_calls import MOST_TOLD, Call, loss_of, near, rows_of
from shardproof.trainer.values.rounding import PARAMS, At
from shardproof.trainer.values.scaled import NEAR
from shardproof.trainer.values.telling import one_or_many, times

BACKWARD = "backward"
"""The event of a backward; that of a step is the class of the optimizer."""

STEP = "step"

REDUCED, GATHERED, LINE = "reduced", "gathered", "line"
"""What lines of a portrait begin with that tell what is reduced over ranks, and what a statement does."""


Size = tuple[float, float]
"""Of a tensor, the sum of squares of all elements, and a sum that weighs each of them otherwise."""


def factor_between(one: Size, other: Size, near: float) -> float | None:
    """By which number every element was multiplied between two moments; None where the sums speak for no number, or one
    of them is zero.

    Args:
        near: how far the two ways to measure it may be apart, as a share of the length.
    """
    (squares, sums), (new_squares, new_sums) = one, other
    if squares == 0 or new_squares == 0:
        return None
    length = sqrt(new_squares / squares)
    signed = -length if sums * new_sums < 0 else length
    return signed if abs(new_sums - signed * sums) <= near * sqrt(new_squares) else None


@dataclass(frozen=True)
class Gradient:
    """What a rank holds of a parameter's gradient, right after the latest backward and right before the step.

    after, before: the sum of squares, and a sum that weighs each element otherwise. sharded: other ranks have the rest.
    copies: how many ranks have the same elements of one that is sharded.
    """

    after: Size
    before: Size
    sharded: bool
    copies: int

    @property
    def factor(self) -> float | None:
        """What it was multiplied by; None where it was changed otherwise. Of zeros that stay zeros it is 0."""
        if self.after[0] == 0 == self.before[0]:
            return 0.0
        return factor_between(self.after, self.before, NEAR)


@dataclass(frozen=True)
class OfStep:
    """What a rank did in a step. steps: class of an optimizer → how often it stepped. stale: parameters whose gradient
    was still that of the step before when the first backward began. gradients: by the names of parameters. waiting:
    parameters with a gradient that no optimizer has stepped with when the operation ends. rates: the learning rates
    of the param groups with which the latest optimizer stepped. events: backwards, and the classes of optimizers that
    stepped, in order. idle: those that were told to step while none of their parameters had a gradient.
    every_rate: the rates of all that stepped. mixed: parameters of which an optimizer stepped with a gradient that is
    made of a backward of its own and of one that reaches another optimizer's."""

    backwards: int
    steps: Mapping[str, int]
    gradients: Mapping[str, Gradient]
    stale: Sequence[str]
    waiting: Sequence[str] = ()
    rates: Sequence[float | None] = ()
    events: Sequence[str] = ()
    idle: Sequence[str] = ()
    every_rate: Sequence[float | None] = ()
    mixed: Sequence[str] = ()

    @property
    def updates(self) -> int:
        """How many times backwards end in steps of optimizers: 2 where the second backward comes behind a step."""
        kinds = [event == BACKWARD for event in self.events]
        return sum(backward and not follows for backward, follows in zip(kinds, [*kinds[1:], False], strict=False))


def measured_by_op(records: Iterable[Record]) -> dict[int, dict[int, OfStep]]:
    """What each rank did in each operation, by the number of the operation and by rank."""
    found: dict[int, dict[int, OfStep]] = {}
    for record in records:
        if record.role == MEASURED:
            told = json.loads(record.data)
            gradients = {
                name: Gradient((one, two), (three, four), sharded, copies)
                for name, (one, two, three, four, sharded, copies) in told["gradients"].items()
            }
            found.setdefault(record.op, {})[record.rank] = OfStep(
                told["backwards"],
                told["steps"],
                gradients,
                told["stale"],
                told["waiting"],
                told["rates"],
                told["events"],
                told["idle"],
                told["every_rate"],
                told["mixed"],
            )
    return found


def scaled_apart(ranks: Mapping[int, OfStep]) -> str:
    """A sentence on ranks of which each multiplies its part of sharded gradients by a number of its own; empty where
    all take the same, or where nobody can tell.

    Args:
        ranks: what each did in a step.
    """
    own: dict[int, float] = {}
    for rank, step in sorted(ranks.items()):
        factors = _factors(gradient for gradient in step.gradients.values() if gradient.sharded)
        if len(factors) != 1 or None in factors:
            return ""
        own[rank] = next(factor for factor in factors if factor is not None)
    if len(own) < 2 or near(own.values()):
        return ""
    told = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in own.items())
    return (
        "Between the backward and the optimizer each rank multiplies its part of the gradients by a number of its own: "
        f"{told}. The parts of one tensor need one number: look at a norm that each rank takes of its own part alone, "
        "as `torch.nn.utils.clip_grad_norm_` does with parameters that are no DTensors, or to which not all ranks add "
        "their share."
    )


def mixed(ranks: Mapping[int, OfStep], step: int) -> str:
    """A note on gradients that are made of the backwards of two optimizers' losses; empty where none is."""
    names = sorted({name for each in ranks.values() for name in each.mixed})
    if not names:
        return ""
    few = f"{', '.join(names[:MOST_TOLD])}{', …' if len(names) > MOST_TOLD else ''}"
    return (
        f"in step {step} an optimizer steps with gradients of two backwards, of which the second reaches parameters of "
        f"another optimizer: {few}; unless both losses are to train these, look at what the second should not reach, "
        "and at where gradients are cleared"
    )


def stale(ranks: Mapping[int, OfStep], step: int) -> str:
    """A note on gradients that were not cleared after the step before; empty where all were."""
    names = sorted({name for each in ranks.values() for name in each.stale})
    if not names:
        return ""
    return (
        f"when the backward of step {step} begins, `.grad` of {one_or_many(names)} is still what an optimizer has "
        "stepped with before, so that this gradient counts again: look at what should have cleared it, such as "
        "`zero_grad`"
    )


NOTHING = OfStep(0, {}, {}, ())

MOST_RATES = 5
"""Steps of which a portrait shows the learning rates, the last among them."""

NOT_MEASURED = (
    "not measured, since no parameter of a module has one in `.grad` both after a backward and when an optimizer of "
    "torch steps with that parameter, as with engines that keep gradients elsewhere, masters that are stepped in place "
    "of parameters, and steps inside of the backward"
)


NO_STEP = "no optimizer of torch steps in it on rank 0"


def portrait(
    ranks: Mapping[int, OfStep], calls: Mapping[int, Sequence[Call]], collectives: Mapping[int, OfRank], before: At,
    rates: Sequence[str],
) -> list[str]:  # fmt: skip
    """What a step does, in a few lines.

    Args:
        ranks, calls, collectives: of the step. before: what there was before it, settings of param groups among it.
        rates: the learning rates in each step of the run.
    """
    lines = []
    if own := calls.get(0):
        lines.append(f"data: rank 0 calls the model {times(len(own))}, with {rows_of(own)}")
    lines += [f"loss: {told}" for told in [loss_of(calls, ranks.get(0, NOTHING).updates)] if told]
    others = _stepping_alone(ranks)
    lines.append(f"order: {order_of(ranks)}")
    lines.append(f"gradients: {_of_gradients(ranks, others)}")
    lines += [f"{REDUCED}: {told}" for told in [reduced(collectives.get(0, {}))] if told]
    lines += [f"{GATHERED}: {told}" for told in [gathered(collectives.get(0, {}))] if told]
    shown = ", ".join(rates) if len(rates) <= MOST_RATES else f"{', '.join(rates[: MOST_RATES - 1])}, …, {rates[-1]}"
    lines += [f"lr: {shown} in steps 0 to {len(rates) - 1}"] if len({*rates}) > 1 else []
    lines += [f"lr: {rates[0]} in every step"] if len({*rates}) == 1 else []
    lines += [f"weight_decay: {told}" for told in [_decays(before)] if told]
    return lines


def order_of(ranks: Mapping[int, OfStep]) -> str:
    """In which order backwards and optimizers of torch run in a step on rank 0."""
    others = _stepping_alone(ranks)
    return f"{_in_order(ranks.get(0, NOTHING))}{f' on rank 0, while one steps on {others}' if others else ''}"


def _stepping_alone(ranks: Mapping[int, OfStep]) -> str:
    """The ranks on which an optimizer steps while none does on rank 0, such as `rank 1`; empty where one does there, or
    nowhere."""
    stepping = [str(rank) for rank, step in sorted(ranks.items()) if step.steps]
    if not stepping or 0 not in ranks or ranks[0].steps:
        return ""
    return f"rank{'s' * (len(stepping) > 1)} {', '.join(stepping)}"


def _of_gradients(ranks: Mapping[int, OfStep], others: str) -> str:
    """What becomes of gradients, or why that is not measured. others: see `_stepping_alone`."""
    told = _between(ranks)
    if others:
        return f"{NO_STEP}, while one does on {others}{f', where {told}' if told else ''}"
    skipped = 0 in ranks and ranks[0].backwards and not ranks[0].steps
    if idle := ranks[0].idle if skipped else ():
        return told or f"none is there when {' and '.join(idle)} is told to step, which then changes nothing"
    return told or (f"not measured, since {NO_STEP}, {AS_SKIPPED}" if skipped else NOT_MEASURED)


AS_SKIPPED = "as where a loss scaler skips the step, or an engine steps by itself"


def _in_order(step: OfStep) -> str:
    """How many backwards and steps there are or, where an optimizer steps before the last backward, what comes after
    what."""
    runs = [(event, len([*same])) for event, same in groupby(step.events)]
    if any(event == BACKWARD for event, _ in runs[1:]):
        told = [_count(number, BACKWARD if event == BACKWARD else STEP, event) for event, number in runs]
        often = len(told) // 2
        if often > 2 and told == told[:2] * often:
            return f"{told[0]}, then {told[1]}, {often} times"
        return ", then ".join(told)
    stepped = ", ".join(
        (
            *(_count(number, STEP, name) for name, number in step.steps.items()),
            *(f"a step of {name} without any gradient" for name in step.idle),
        )
    )
    return f"{_count(step.backwards, BACKWARD)}, and {stepped or 'no step of an optimizer of torch'}"


def _count(number: int, what: str, name: str = "") -> str:
    return f"{number} {what}{'s' * (number != 1)}{f' of {name}' if what == STEP else ''}"


def _between(ranks: Mapping[int, OfStep]) -> str:
    """What becomes of gradients between the backward and the optimizer."""
    every = [gradient for step in ranks.values() for gradient in step.gradients.values()]
    if not every:
        return ""
    factors = _factors(every)
    norms = [_norm(ranks, after=after) for after in (True, False)]
    length = "" if None in norms else f"; their norm is {norms[0]:.5g}, and {norms[1]:.5g} when the optimizer steps"
    if None in factors:
        return f"between the backward and the optimizer they are changed, and not by a number alone{length}"
    told = sorted(factor for factor in factors if factor is not None)
    by_rank = {rank: _factors(step.gradients.values()) for rank, step in sorted(ranks.items()) if step.gradients}
    if len(told) > 1 and len(by_rank) > 1 and all(len(own) == 1 for own in by_rank.values()):
        each = (f"{factor:.5g} on rank {rank}" for rank, own in by_rank.items() for factor in own)
        return f"between the backward and the optimizer all are multiplied by {', '.join(each)}{length}"
    if len(told) > 1:
        values = ", ".join(f"{factor:.5g}" for factor in told[: MOST_TOLD + 1])
        return (
            f"between the backward and the optimizer some are multiplied by other numbers than others: {values}{length}"
        )
    if not told or abs(told[0] - 1) <= NEAR:
        return f"the optimizer has them as the backward left them{length.partition(', and')[0]}"
    return f"between the backward and the optimizer all are multiplied by {told[0]:.5g}{length}"


def squares_of(ranks: Mapping[int, OfStep], *, after: bool) -> dict[str, tuple[float, bool]]:
    """Of each parameter whose whole gradient is known, the sum of its squares, and whether all ranks have to do with
    it. Not known is one that ranks have whole, and not alike.

    Args:
        after: right after the backward, or else right before the step.
    """
    found: dict[str, tuple[float, bool]] = {}
    for name in _names(ranks):
        own = [step.gradients[name] for step in ranks.values() if name in step.gradients]
        sizes = [(one.after if after else one.before)[0] for one in own]
        if own[0].sharded:
            found[name] = sum(sizes) / own[0].copies, True
        elif near(sizes):
            found[name] = sizes[0], len(own) == len(ranks)
    return found


def _names(ranks: Mapping[int, OfStep]) -> list[str]:
    return list(dict.fromkeys(name for step in ranks.values() for name in step.gradients))


def _norm(ranks: Mapping[int, OfStep], *, after: bool) -> float | None:
    """The norm of the whole gradient; None where it is not known which ranks have the same of it."""
    squares = squares_of(ranks, after=after)
    known = len(squares) == len(_names(ranks)) and all(everywhere for _, everywhere in squares.values())
    return sqrt(sum(size for size, _ in squares.values())) if known else None


def factor_of(step: OfStep) -> float | None:
    """By which number all gradients are multiplied between the backward and the optimizer; None where it is not one."""
    found = _factors(step.gradients.values())
    return found[0] if len(found) == 1 else None


def _factors(gradients: Iterable[Gradient]) -> list[float | None]:
    """The numbers that gradients other than zeros were multiplied by, each once; one None where some was changed
    otherwise."""
    found: list[float | None] = []
    for gradient in gradients:
        if not gradient.after[0] and not gradient.before[0]:
            continue
        factor = gradient.factor
        if factor is None:
            return [None]
        if not any(one is not None and near((one, factor)) for one in found):
            found.append(factor)
    return found


def rates_at(step: OfStep, before: At) -> str:
    """The learning rates of the param groups with which optimizers stepped, each number once; those from before the
    step, if they are none of torch's."""
    told = [f"{rate:.6g}" for rate in step.every_rate or step.rates if rate is not None]
    return " and ".join(dict.fromkeys(told)) or rates_told(before)


def rates_told(before: At) -> str:
    """The learning rates of the param groups, each number once."""
    values = [_number(value) for key, value in sorted(before.items()) if key[0] == SETTING and key[1].endswith(".lr")]
    return " and ".join(dict.fromkeys(values))


def _decays(before: At) -> str:
    """Which weight decay parameters have, and how many of them are vectors, which often should have none."""
    found: dict[str, list[str]] = {}
    for (role, name), value in sorted(before.items()):
        group, _, setting = name.rpartition(".")
        names = before.get((SETTING, f"{group}.params"))
        if role == SETTING and setting == "weight_decay" and names and names.data:
            found.setdefault(_number(value), []).extend(names.data.decode().split("\n"))
    told = []
    for decay, own in found.items():
        shapes = {name: before[PARAMS, name].shape for name in own if (PARAMS, name) in before}
        vectors = [name for name, shape in shapes.items() if len(shape) < 2]
        few = f"{', '.join(vectors[:MOST_TOLD])}{', …' if len(vectors) > MOST_TOLD else ''}"
        such = f", {len(vectors)} of them vectors ({few})" if vectors else ""
        told.append(f"{decay} for {len(own)} parameter{'s' * (len(own) != 1)}{such}")
    return "; ".join(told)


def _number(value: Value) -> str:
    text = value.data.decode().rpartition(" ")[2]
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return text
