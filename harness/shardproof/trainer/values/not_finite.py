"""Where a NaN or an infinity comes up first, of what was observed of a step: in the order in which a step computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardproof.diff import as_numbers
from shardproof.observe.logical import Value
from shardproof.trainer.values.every_mesh import BESIDE, Name, Values
from shardproof.trainer.values.gradients import NOT_FINITE, OfParameters
from shardproof.trainer.values.rounding import FLOATS, PARAMS


def where_first(keys: Sequence[Name], own: Values, other: Values, output: str | None, seen: OfParameters) -> str:
    """The end of a sentence; empty where no value has a NaN or an infinity that the other way does not have.

    Args:
        keys: what differs. own, other: what either way has, or a run after a step and before it. output: the first
            module whose output has one; None where nobody looked. seen: what optimizers had of each parameter.
    """
    wild = [key for key in keys if is_wild(own.get(key)) and not is_wild(other.get(key))]
    if not wild:
        return ""
    gradients = [name for name, word in seen.items() if word == NOT_FINITE]
    if output:
        return f"the output of {output} is the first to have one"
    if gradients:
        outputs = "" if output is None else "the outputs of modules that were seen have none, and "
        whose = gradients[0] or "a parameter that no module has"
        return f"{outputs}the gradient of {whose} has one when the optimizer steps"
    given = "no gradient that the optimizer was given has one, and " if seen else ""
    state = [key for key in wild if key[0] in BESIDE]
    if state:
        role, name = state[0]
        return f"{given}{role} of {name} has one after the optimizer's step: look at what it divides by"
    params = [name for role, name in wild if role == PARAMS]
    if params:
        return f"{given}{params[0]} has one, and no state of the optimizer has: look at what the step divides by"
    return f"{' of '.join(wild[0])} has one"


def is_wild(value: Value | None) -> bool:
    """Whether a tensor of floats has an element that is NaN or infinite."""
    return value is not None and value.dtype in FLOATS and not np.isfinite(as_numbers(value).astype(np.float64)).all()
