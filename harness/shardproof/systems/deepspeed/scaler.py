"""DeepSpeed's dynamic loss scale as the twin counts it, from the written contract (`contract.STABLE_INTERVALS`)."""

from __future__ import annotations

from shardproof.oracle.scaler import CountedScaler


def count(scaler: CountedScaler, *, overflow: bool) -> None:
    """One step. `growth` is the number of steps since the last overflow, or since the start; growing does not reset it.

    For example, with a window of 2 the third, fifth and seventh step double the scale: only a step that has two, or
    four, without overflow behind it does.
    """
    stable = scaler.growth
    _count(scaler, grows=stable > 0 and stable % scaler.rule.window == 0, overflow=overflow)


def count_early(scaler: CountedScaler, *, overflow: bool) -> None:
    """One step of releases before 0.17 (`contract.EARLY_INTERVALS`): a step counts itself, so that with a window of 2
    the second, fourth and sixth double the scale."""
    _count(scaler, grows=(scaler.growth + 1) % scaler.rule.window == 0, overflow=overflow)


def _count(scaler: CountedScaler, *, grows: bool, overflow: bool) -> None:
    hysteresis = scaler.hysteresis
    assert hysteresis is not None, "this scaler always has one"
    if overflow:
        scaler.growth = 0
        if hysteresis == 1:
            scaler.scale = max(scaler.scale / 2, scaler.rule.minimum)
        else:
            scaler.hysteresis = hysteresis - 1
        return
    if grows:
        scaler.scale *= 2
        scaler.hysteresis = scaler.rule.hysteresis
    scaler.growth += 1
