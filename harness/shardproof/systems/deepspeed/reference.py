"""The rules of DeepSpeed as the reference applies them, in numpy; the twin's are `clipping` and `scaler`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shardproof.oracle.inputs import Clip, LossScale


def clip_by_inverse(squares: float, dtypes: Collection[str], clip: Clip) -> tuple[float, Any]:
    """`contract.INVERSE_CLIPPING`: the norm, and the coefficient that multiplies every gradient in fp32."""
    import numpy as np

    real = np.float64 if clip.norm_dtype == "fp64" else np.float32
    norm = real(np.sqrt(squares))
    excess = (norm + real(1e-6)) / real(clip.bound)
    return float(norm), np.float32(real(1) / max(excess, real(1)))


def clip_directly(squares: float, dtypes: Collection[str], clip: Clip) -> tuple[float, Any]:
    """`contract.DIRECT_CLIPPING`: the norm, and the coefficient, if it is below 1. A number that
    torch divides by a tensor is multiplied with its inverse, which rounds twice."""
    import numpy as np

    norm = np.float32(np.sqrt(squares))
    coefficient = np.float32(1) / (norm + np.float32(1e-6)) * np.float32(clip.bound)
    return float(norm), coefficient if coefficient < 1 else None


def count_scale(scaler: Any, rule: LossScale, overflow: bool) -> None:
    """`contract.STABLE_INTERVALS`: a step that has whole windows behind it doubles the scale."""
    stable = scaler.growth_tracker
    _count_scale(scaler, rule, overflow, doubles=stable >= rule.window and stable % rule.window == 0)


def count_scale_early(scaler: Any, rule: LossScale, overflow: bool) -> None:
    """`contract.EARLY_INTERVALS`: the last step of a whole window doubles the scale."""
    _count_scale(scaler, rule, overflow, doubles=(scaler.growth_tracker + 1) % rule.window == 0)


def _count_scale(scaler: Any, rule: LossScale, overflow: bool, doubles: bool) -> None:
    stable = scaler.growth_tracker
    scaler.growth_tracker = 0 if overflow else stable + 1
    if overflow and scaler.hysteresis_tracker > 1:
        scaler.hysteresis_tracker -= 1
    elif overflow:
        scaler.scale = max(scaler.scale * 0.5, rule.minimum)
    elif doubles:
        scaler.scale, scaler.hysteresis_tracker = scaler.scale * 2.0, rule.hysteresis
