"""A dynamic loss scale that a library counts by its own rule, as the twin counts it: from the written contract."""

from __future__ import annotations

from typing import Any

from harness.oracle.inputs import LossScale


class CountedScaler:
    """scale: the loss scale. growth: steps without overflow since it grew. hysteresis: overflows it can still bear;
    None where the rule has none."""

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self.scale, self.growth, self.hysteresis = rule.initial, 0, rule.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Count one step."""
        if overflow:
            self.growth = 0
            if self.hysteresis is not None:
                self.hysteresis -= 1
            if self.hysteresis is None or self.hysteresis <= 0:
                self.scale = max(self.scale * 0.5, self.rule.minimum)
            return
        self.growth += 1
        if self.growth == self.rule.window:
            self.growth, self.hysteresis = 0, self.rule.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "rule"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
