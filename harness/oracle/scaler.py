"""Megatron's dynamic loss scale, as the twin counts it: from the written contract (`contracts.MEGATRON`)."""

from __future__ import annotations

from typing import Any

WINDOW, HYSTERESIS = 2, 2
"""Steps without overflow after which the scale doubles, and overflows after which it halves, in every scenario."""


class MegatronScaler:
    """scale: the loss scale. growth: steps without overflow since it grew. hysteresis: overflows it can still bear."""

    def __init__(self, scale: float) -> None:
        self.scale, self.growth, self.hysteresis = scale, 0, HYSTERESIS

    def update(self, *, overflow: bool) -> None:
        """Count one step."""
        if overflow:
            self.growth = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
            return
        self.growth += 1
        if self.growth == WINDOW:
            self.growth, self.hysteresis = 0, HYSTERESIS
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
