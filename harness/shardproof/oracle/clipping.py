"""Clipping by global norm as the twin does it: from the written contract, on torch tensors, with the norm given.

The reference has its own (`shardproof.reference.clipping`).
"""

from __future__ import annotations

import torch

from shardproof.oracle.inputs import Clip


def as_torch(gradients: dict[str, torch.Tensor], norm: float, clip: Clip) -> None:
    """The rule `inputs.TORCH_CLIPPING`: torch's own function, given the total norm."""
    params = []
    for gradient in gradients.values():
        param = torch.empty_like(gradient)
        param.grad = gradient
        params.append(param)
    device = params[0].device if params else None
    total = torch.tensor(norm, dtype=_norm_dtype(params), device=device)
    torch.nn.utils.clip_grads_with_norm_(params, clip.bound, total)


def in_double(gradients: dict[str, torch.Tensor], norm: float, clip: Clip) -> None:
    """The rule `inputs.DOUBLE_CLIPPING`: the coefficient in double precision, the product in fp32."""
    coefficient = clip.bound / (norm + 1e-6)
    if coefficient < 1.0:
        for fqn, gradient in gradients.items():
            scaled = gradient.float() * torch.tensor(coefficient, dtype=torch.float32)
            gradients[fqn] = scaled.to(gradient.dtype)


def _norm_dtype(params: list[torch.Tensor]) -> torch.dtype:
    """The dtype torch.nn.utils.get_total_norm returns for gradients of these parameters."""
    dtype = torch.get_default_dtype() if not params else params[0].dtype
    for param in params[1:]:
        dtype = torch.promote_types(dtype, param.dtype)
    return dtype
