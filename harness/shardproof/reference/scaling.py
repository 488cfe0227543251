"""How the reference counts a dynamic loss scale. The twin has its own rule (`shardproof.oracle.scaler`)."""

from __future__ import annotations

from shardproof.oracle.inputs import LossScale
from shardproof.reference.state import Scaler


def count(scaler: Scaler, rule: LossScale, overflow: bool) -> None:
    """The rule `inputs.COUNTED`."""
    scaler.growth_tracker = 0 if overflow else scaler.growth_tracker + 1
    if overflow:
        _shrink(scaler, rule.minimum)
    elif scaler.growth_tracker == rule.window:
        scaler.scale *= 2.0
        scaler.growth_tracker = 0
        scaler.hysteresis_tracker = rule.hysteresis


def _shrink(scaler: Scaler, minimum: float) -> None:
    """Halve the scale, but not before a hysteresis is used up, and never below its minimum."""
    if scaler.hysteresis_tracker is not None:
        scaler.hysteresis_tracker -= 1
        if scaler.hysteresis_tracker > 0:
            return
    scaler.scale = max(scaler.scale * 0.5, minimum)
