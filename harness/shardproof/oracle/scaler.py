"""A dynamic loss scale that a library counts by a rule of its own, as the twin counts it: from the written contract.

Where the library uses torch.amp.GradScaler, the twin runs that itself, and this is not needed.
"""

from __future__ import annotations

from typing import Any

from shardproof.entry import resolve
from shardproof.oracle.inputs import LossScale


class CountedScaler:
    """scale: the loss scale. growth: steps without overflow since it grew. hysteresis: overflows it can still bear;
    None where the rule has none."""

    def __init__(self, rule: LossScale, initial: float) -> None:
        self.rule = rule
        self.scale, self.growth, self.hysteresis = initial, 0, rule.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Update the loss scale after one step, by the library's rule for overflow and growth."""
        resolve(self.rule.rule.twin)(self, overflow=overflow)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "rule"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def count(scaler: CountedScaler, *, overflow: bool) -> None:
    """The rule `inputs.COUNTED`: double after a window without overflow, halve when the hysteresis is used up."""
    if overflow:
        scaler.growth = 0
        if scaler.hysteresis is not None:
            scaler.hysteresis -= 1
        if scaler.hysteresis is None or scaler.hysteresis <= 0:
            scaler.scale = max(scaler.scale * 0.5, scaler.rule.minimum)
        return
    scaler.growth += 1
    if scaler.growth == scaler.rule.window:
        scaler.growth, scaler.hysteresis = 0, scaler.rule.hysteresis
        scaler.scale *= 2.0
