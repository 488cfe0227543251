"""DeepSpeed's dynamic loss scale as the twin counts it, from the written contract (`contract.STABLE_INTERVALS`)."""

from __future__ import annotations

from shardproof.oracle.scaler import CountedScaler


def count(scaler: CountedScaler, *, overflow: bool) -> None:
    """One step. `growth` is the number of steps since the last overflow, or since the start; growing does not reset it.

    For example, with a window of 2 the third, fifth and seventh step double the scale: only a step that has two, or
    four, without overflow behind it does.
    """
    hysteresis = scaler.hysteresis
    assert hysteresis is not None, "this scaler always has one"
    if overflow:
        scaler.growth = 0
        if hysteresis == 1:
            scaler.scale = max(scaler.scale / 2, scaler.rule.minimum)
        else:
            scaler.hysteresis = hysteresis - 1
        return
    if scaler.growth and scaler.growth % scaler.rule.window == 0:
        scaler.scale *= 2
        scaler.hysteresis = scaler.rule.hysteresis
    scaler.growth += 1
