"""DeepSpeed's clipping as the twin does it, from the written contract (`contract.INVERSE_CLIPPING`)."""

from __future__ import annotations

from typing import Any

from harness.oracle.inputs import Clip


def by_inverse(gradients: dict[str, Any], norm: float, clip: Clip) -> None:
    """Multiply every gradient by 1 / max(1, (norm + 1e-6) / bound), each operation rounded to fp32."""
    for gradient in gradients.values():
        excess = (gradient.new_tensor(norm) + 1e-6) / clip.bound
        gradient.mul_(1.0 / excess.clamp(min=1.0))
