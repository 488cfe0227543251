"""FusedAdam's kernel for CUDA graphs, which unscales the gradient itself. No scenario has a scale there, so that the
reference needs the plain kernel only; tests compare the library's Python and the real kernel with this one."""

from __future__ import annotations

import numpy as np
from shardproof.reference.fused_adam import Scalars, step_tensor
from shardproof.reference.numerics import FP32, Array


@np.errstate(all="ignore")
def step_capturable(
    scalars: Scalars,
    param: Array,
    grad: Array,
    state: dict[str, Array],
    *,
    inv_scale: float = 1.0,
    found_inf: bool = False,
) -> None:
    """As `step_tensor`, but the fp32 product of the gradient with `inv_scale` is what the update reads.

    The gradient, of the parameter's dtype, is overwritten with the product rounded. With `found_inf` nothing happens at
    all. Masters are fp32, moments both fp32 or both bf16.
    """
    if found_inf:
        return
    product = grad.astype(FP32) * np.float32(inv_scale)
    grad[...] = product
    step_tensor(scalars, param, product, state)
