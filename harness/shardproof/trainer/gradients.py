"""What optimizers had of each parameter when they stepped, as ranks say it (`shardproof.trainer.rank.gradients`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from shardproof.observe.record import Record
from shardproof.trainer.arms import GRADIENTS

NONE, ZEROS, NOT_FINITE, GRADIENT = "none", "zeros", "not finite", "gradient"
FROZEN, STEPPED_FROZEN = "frozen", "stepped although frozen"

OfParameters = Mapping[str, str]
"""Name of a parameter → one of the words above, of the rank that has most: a gradient of zeros on one of two ranks is
none of zeros."""

_LEAST_FIRST = (NONE, ZEROS, FROZEN, GRADIENT, STEPPED_FROZEN, NOT_FINITE)

_SUSPECTS = {
    NONE: "no gradient arrives (`.grad` is None when the optimizer steps)",
    ZEROS: "their gradients are all zeros when the optimizer steps",
    FROZEN: "they are frozen (`requires_grad` is False)",
    GRADIENT: "gradients other than zero are there when the optimizer steps, so look at what skips its step, or undoes it",
    NOT_FINITE: "their gradients are NaN or infinite, for which a loss scale skips a step",
}


def gradients_by_op(records: Iterable[Record]) -> dict[int, OfParameters]:
    """Operation → what its steps had."""
    found: dict[int, dict[str, str]] = {}
    for record in records:
        if record.role == GRADIENTS:
            of_op = found.setdefault(record.op, {})
            for name, word in json.loads(record.data).items():
                of_op[name] = max(of_op.get(name, word), word, key=_LEAST_FIRST.index)
    return found


def why_still(names: Sequence[str], seen: OfParameters) -> str:
    """Why parameters do not move, by what optimizers had of them; empty where that is not one thing, or not known."""
    words = {seen.get(name, "") for name in names}
    return _SUSPECTS.get(min(words), "") if len(words) == 1 else ""


def stepped_frozen(seen: OfParameters) -> list[str]:
    """The frozen parameters that an optimizer steps. Where it steps no other, gradients are the trainer's own, such as
    those that are computed without autograd."""
    trained = any(word in (GRADIENT, ZEROS, NOT_FINITE) for word in seen.values())
    return [name for name, word in seen.items() if word == STEPPED_FROZEN] if trained else []


def are_frozen(names: Sequence[str], seen: OfParameters) -> bool:
    """Whether parameters are frozen, all of them."""
    return bool(names) and all(seen.get(name) in (FROZEN, STEPPED_FROZEN) for name in names)
