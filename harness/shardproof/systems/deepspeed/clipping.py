"""DeepSpeed's clipping as the twin does it, from the written contract (`INVERSE_CLIPPING` and `DIRECT_CLIPPING`)."""

from __future__ import annotations

from typing import Any

from shardproof.oracle.inputs import Clip


def by_inverse(gradients: dict[str, Any], norm: float, clip: Clip) -> None:
    """Multiply every gradient by 1 / max(1, (norm + 1e-6) / bound), each operation rounded to the norm's dtype."""
    for gradient in gradients.values():
        total = gradient.double().new_tensor(norm) if clip.norm_dtype == "fp64" else gradient.new_tensor(norm)
        excess = (total + 1e-6) / clip.bound
        gradient.mul_(1.0 / excess.clamp(min=1.0))


def directly(gradients: dict[str, Any], norm: float, clip: Clip) -> None:
    """Multiply every gradient by bound / (norm + 1e-6), each operation rounded to fp32, if that is below 1."""
    for gradient in gradients.values():
        coefficient = clip.bound / (gradient.new_tensor(norm) + 1e-6)
        if coefficient < 1:
            gradient.mul_(coefficient)
