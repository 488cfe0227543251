"""Gradients that a line of the trainer's own multiplies, as a clip does, while they are still multiplied by the loss
scale.

A scaler of torch divides gradients by its scale in `unscale_` or, where nobody called that, inside of `step`. What is
done to them before counts the scale in: a limit of 1 on a norm of 65536 times its length clips every step.

*Verifies*: that gradients go from the backward to the optimizer by one factor, and that a line multiplies them before
another one divides them by the scale, or that no line does and the optimizer has them without it. *Does not verify*:
scalers that keep no `scale` in their state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose, prod

from shardproof.trainer.lines.statements import Touch
from shardproof.trainer.step.measured import OfStep, factor_of
from shardproof.trainer.values.counted import plain_number
from shardproof.trainer.values.overflows import SCALER
from shardproof.trainer.values.rounding import At

NEAR = 0.01
"""How far two ways to come to a factor may be apart, as a share of it."""


def changed_while_scaled(ranks: Mapping[int, OfStep], before: At, touches: Sequence[Touch], step: int) -> str:
    """A note on a line that multiplies gradients while a loss scale is in them; empty where there is none.

    Args:
        ranks: what each did in the step. before: what there is before it. touches: what lines did in it, on rank 0.
    """
    scales = {float(text) for name in before if name[0] == SCALER and name[1].endswith("scale")
              if (text := plain_number(before, name).partition(" ")[2])}  # fmt: skip
    scale = scales.pop() if len(scales) == 1 else 1.0
    total = factor_of(ranks[0]) if 0 in ranks else None
    changing = [touch for touch in touches if touch.scaled]
    if total is None or scale in (0.0, 1.0) or not changing or any(len(touch.scaled) > 1 for touch in changing):
        return ""
    unscaled = [at for at, touch in enumerate(changing) if isclose(touch.scaled[0] * scale, 1.0, rel_tol=NEAR)]
    hidden = isclose(total * scale, prod(touch.scaled[0] for touch in changing), rel_tol=NEAR)
    before_it = changing[: unscaled[0]] if unscaled else changing if hidden else []
    if not before_it:
        return ""
    first = before_it[0]
    return (
        f"in step {step} {first.place} multiplies gradients by {first.scaled[0]:.5g} while they still have the factor "
        f"of the loss scale, {scale:.6g}, by which they are divided only behind it: a limit on them counts it in; call "
        "the scaler's `unscale_` before it"
    )
