"""The arithmetic of the multi-tensor kernels of apex and TransformerEngine: IEEE fp32, one rounding an operation.

Source of the formulas: apex `csrc/multi_tensor_{adam,sgd_kernel,scale_kernel,l2norm_kernel}.cu` and TE
`common/multi_tensor/adam.cu`. The kernels that users run are built with fast math (contracted multiply-adds,
approximate division, flushed subnormals): a GPU's bits differ from these, and are no reference for them.
Scalars are C floats; only a bias correction is computed in double (of the beta as a float) and then rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shardproof.emulation.used_symbols import touch

_maximum = torch.maximum


def maximum(input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """torch.maximum as a GPU computes it: of 0 and -0 it is 0, in either order, where a CPU gives the first of equals.

    Source: PTX ISA, `max` of floating-point numbers; `fmaxf` in aten/src/ATen/native/cuda/MaxMinElementwiseKernel.cu.
    """
    found = _maximum(input, other, out=out)
    if type(found) is not torch.Tensor or found.is_meta or not found.is_floating_point():
        return found
    signed = (found == 0) & torch.signbit(found)
    if not signed.any():
        return found
    touch("torch.maximum of 0 and -0")
    return torch.where(signed, input + other, found, out=out)  # 0 + -0 is 0, -0 + -0 is -0


@dataclass(frozen=True)
class AdamScalars:
    """The kernel's scalar arguments, each an fp32 value held in a Python float."""

    lr: float
    beta1: float
    beta2: float
    rest1: float
    rest2: float
    correction1: float
    correction2: float
    eps: float
    weight_decay: float
    decoupled: bool

    @classmethod
    def from_hyperparameters(
        cls,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        *,
        decoupled: bool,
        bias_correction: bool = True,
    ) -> AdamScalars:
        """Round as the kernel's argument list does. step: counted from 1."""
        beta1, beta2 = _f32(betas[0]), _f32(betas[1])
        corrections = (_f32(1.0 - beta1**step), _f32(1.0 - beta2**step)) if bias_correction else (1.0, 1.0)
        rests = (_f32(np.float32(1.0) - np.float32(beta1)), _f32(np.float32(1.0) - np.float32(beta2)))
        return cls(_f32(lr), beta1, beta2, *rests, *corrections, _f32(eps), _f32(weight_decay), decoupled)


def _f32(value: float | np.float32) -> float:
    return float(np.float32(value))


def adam(
    scalars: AdamScalars, grad: torch.Tensor, param: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One Adam step of fp32 values; m and v (fp32) change in place; the new fp32 parameter is returned."""
    g, p = grad.float(), param.float()
    if not scalars.decoupled:
        g = g.add(p.mul(scalars.weight_decay))
    m.mul_(scalars.beta1).add_(g.mul(scalars.rest1))
    v.mul_(scalars.beta2).add_(g.mul(scalars.rest2).mul_(g))
    denominator = (
        v.div(scalars.correction2).double().sqrt_().float().add_(scalars.eps)
    )  # not torch.sqrt, whose fp32 root is not correctly rounded
    update = m.div(scalars.correction1).div_(denominator)
    if scalars.decoupled:
        update = update.add(p.mul(scalars.weight_decay))
    return p.sub(update.mul_(scalars.lr))


def join_remainder(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter and the int16 low halves of its bits (a negative one was rounded up)."""
    high = param.view(torch.int16).to(torch.int32)
    low = remainder.to(torch.int32)
    high = torch.where(low < 0, high - 1, high)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def split_remainder(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bf16 parameter, int16 low halves) of an fp32 master. It rounds to nearest with ties away from zero, which is
    not how bf16 is rounded elsewhere."""
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)
    high = (bits >> 16).to(torch.int16)
    high = torch.where(low < 0, high + 1, high)
    return high.view(torch.bfloat16), low


def sgd(
    grad: torch.Tensor,
    param: torch.Tensor,
    momentum_buffer: torch.Tensor,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first_run: bool,
    decay_after_momentum: bool,
) -> torch.Tensor:
    """One SGD step in fp32; the momentum buffer changes in place; the new parameter is returned in fp32.

    A buffer in fp16 is rounded when it is stored, after the update took it. The update of an fp16 parameter is rounded
    to fp16 before it is added, as `half += float` does it.
    """
    g, p = grad.float(), param.float()
    decay = _f32(weight_decay)
    if decay != 0.0 and not decay_after_momentum:
        g = g.add(p.mul(decay))
    if _f32(momentum) != 0.0:
        new = g
        if not first_run:
            kept = momentum_buffer.float().mul(_f32(momentum))
            new = kept.add(g.mul(_f32(np.float32(1.0) - np.float32(dampening))))
        momentum_buffer.copy_(new)
        g = g.add(new.mul(_f32(momentum))) if nesterov else new
    if decay != 0.0 and decay_after_momentum:
        g = g.add(p.mul(decay))
    update = g.mul(-_f32(lr))
    return p.add(update.to(param.dtype).float())


def scale(source: torch.Tensor, target: torch.Tensor, factor: float) -> bool:
    """target = source * factor in fp32, rounded to the target's dtype. True where a value read is not finite."""
    values = source.float()
    target.copy_(values.mul(_f32(factor)))
    return not bool(values.isfinite().all())


def l2norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The fp32 norm of all values, shape (1,). The kernel's order of summation is not defined: squares are fp32, their
    sum is exact to within a double, and overflows where fp32 does."""
    total = torch.zeros(1, dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        total = total + tensor.float().square().sum(dtype=torch.float64)
    return total.float().sqrt()
