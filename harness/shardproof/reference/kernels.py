"""The reference's optimizer arithmetic: bit for bit what torch.optim does on the CPU, on whole flat arrays.

Every kernel is elementwise, so one call serves any concatenation of parameters, shards or ranks that share a
dtype, hyperparameters and a step count. The order of operations and roundings is that of torch 2.13's
`torch/optim/{adam,sgd}.py` and of the native fused kernels, with `ATEN_CPU_CAPABILITY=default` (no FMA
contraction) and one thread:

* for-loop and foreach are sequences of tensor operations, the same ones: on the CPU foreach falls back to them.
  In half precision every operation rounds its result to the storage dtype. A scalar that is added (`eps`) or
  that scales an added tensor (`alpha`) is rounded to half first; one that divides, or that `addcmul`, `addcdiv`
  and `lerp` take, acts in fp32. A scalar that multiplies is where the two differ: fp32 in `Tensor.mul_`,
  rounded to half in `_foreach_mul_`.
* fused computes one step of an element in fp32 and rounds only what it stores. Its square root is correctly
  rounded, unlike that of `torch.sqrt` in fp32.
* multi_tensor is FusedAdam of apex and TransformerEngine, which `fused_adam` says exactly. Their FusedSGD takes the
  operations of torch's for-loop in fp32.

Scalars that depend on hyperparameters (bias corrections, step size) are computed in double precision first.
Kernels whose result depends on an element's position have no rule to follow here: see `oracle.kernels_table`.
NaN payloads are not part of the contract. The reference shares this module with nobody: the twin steps with
torch.optim itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardproof.oracle.kernels_table import POSITION_DEPENDENT
from shardproof.reference import fused_adam
from shardproof.reference.numerics import BF16, F32, FP16, FP32, Array, rounded, rounded_scalar, torch_sqrt

DTYPE_NAMES: dict[np.dtype[Any], str] = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}


COUNT_NO_STEPS = ("sgd", "muon")
"""Kinds of optimizers that keep no count of steps."""


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one group, python floats as torch.optim takes them.

    kind: `sgd`, `adam` (weight decay enters the gradient), `adamw` (decoupled) or `muon` (`reference.muon`). impl:
    `forloop`, `foreach`, `fused` or `multi_tensor`. beta1, beta2 matter to adam and adamw only, eps to them and muon,
    momentum and nesterov to sgd and muon.
    """

    kind: str
    impl: str
    lr: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False


@np.errstate(all="ignore")
def update(hyper: Hyper, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
    """One optimizer step in place, elementwise.

    Args:
        hyper: the group's hyperparameters.
        param: shape (n,), float32, bfloat16 or float16. Updated.
        grad: shape (n,), the dtype of `param`; with multi_tensor any float dtype. Unchanged (torch's foreach SGD with
            nesterov and without weight decay overwrites it; that is a fact about `.grad` after the step, not about
            the update).
        state: `exp_avg` and `exp_avg_sq` (adam, adamw) or `momentum` (sgd), shape (n,), the dtype of `param`; with
            multi_tensor any float dtype. Updated. SGD with momentum creates a missing `momentum` as a copy of the
            (decayed) gradient. In a step where only some tensors of a group lack it (after an unfreeze), torch's
            foreach takes the for-loop's operations for the others: pass `impl="forloop"` then.
        step: number of this step, from 1; matters to adam and adamw only.

    Raises:
        ValueError: a combination of `oracle.kernels_table.POSITION_DEPENDENT`.
    """
    reason = POSITION_DEPENDENT.get((hyper.kind, hyper.impl, DTYPE_NAMES[param.dtype]))
    if reason:
        raise ValueError(f"{hyper.impl} {hyper.kind} on {param.dtype} has no elementwise rule: {reason}")
    match hyper.kind, hyper.impl:
        case "muon", _:
            raise ValueError("Muon does not step element by element: see `reference.muon`")
        case "sgd", _:
            _sgd(hyper, param, grad, state)
        case _, "fused":
            _adam_fused(hyper, param, grad, state, step)
        case _, "multi_tensor":
            _adam_multi_tensor(hyper, param, grad, state, step)
        case _:
            _adam(hyper, param, grad, state, step)


def _sgd(hyper: Hyper, param: Array, grad: Array, state: dict[str, Array]) -> None:
    dtype = param.dtype
    p, g = working(param), working(grad)
    if hyper.weight_decay != 0:
        g = add(g, p, hyper.weight_decay, dtype)
    if hyper.momentum != 0:
        if "momentum" in state:
            buffer = working(state["momentum"])
            buffer *= _multiplier(hyper, hyper.momentum, dtype)
            rounded(buffer, dtype)
            buffer += g
            state["momentum"][...] = rounded(buffer, dtype)
        else:
            state["momentum"] = g.astype(dtype)
            buffer = g
        g = add(g, buffer, hyper.momentum, dtype) if hyper.nesterov else buffer
    param[...] = add(p, g, -hyper.lr, dtype)


def _adam(hyper: Hyper, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
    """Adam and AdamW as tensor operations: each rounds its result to the storage dtype."""
    dtype = param.dtype
    p, g = working(param), working(grad)
    exp_avg, exp_avg_sq = working(state["exp_avg"]), working(state["exp_avg_sq"])
    if hyper.weight_decay != 0:
        if hyper.kind == "adamw":
            p *= _multiplier(hyper, 1 - hyper.lr * hyper.weight_decay, dtype)
            rounded(p, dtype)
        else:
            g = add(g, p, hyper.weight_decay, dtype)

    exp_avg = rounded(lerp(exp_avg, g, 1 - hyper.beta1), dtype)
    exp_avg_sq *= _multiplier(hyper, hyper.beta2, dtype)
    rounded(exp_avg_sq, dtype)
    exp_avg_sq += _scaled_square(g, 1 - hyper.beta2)
    rounded(exp_avg_sq, dtype)
    state["exp_avg"][...] = exp_avg
    state["exp_avg_sq"][...] = exp_avg_sq

    step_size = hyper.lr / (1 - hyper.beta1**step)
    denom = torch_sqrt(exp_avg_sq, dtype)
    denom /= np.float32((1 - hyper.beta2**step) ** 0.5)
    rounded(denom, dtype)
    denom += rounded_scalar(hyper.eps, dtype)
    rounded(denom, dtype)
    param[...] = _addcdiv(p, exp_avg, denom, -step_size)


def _adam_fused(hyper: Hyper, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
    """Adam and AdamW as one native kernel: fp32 throughout, rounded where it stores."""
    p, g = working(param), working(grad)
    exp_avg, exp_avg_sq = working(state["exp_avg"]), working(state["exp_avg_sq"])
    if hyper.weight_decay != 0:
        if hyper.kind == "adamw":
            p *= np.float32(1 - hyper.lr * hyper.weight_decay)
        else:
            g = add(g, p, hyper.weight_decay, FP32)

    exp_avg = lerp(exp_avg, g, 1 - hyper.beta1)
    exp_avg_sq *= np.float32(hyper.beta2)
    exp_avg_sq += _scaled_square(g, 1 - hyper.beta2)
    state["exp_avg"][...] = exp_avg
    state["exp_avg_sq"][...] = exp_avg_sq

    step_size = hyper.lr / (1 - hyper.beta1**step)
    denom = np.sqrt(exp_avg_sq)
    denom /= np.float32(math.sqrt(1 - hyper.beta2**step))
    denom += np.float32(hyper.eps)
    param[...] = _addcdiv(p, exp_avg, denom, -step_size)


def _adam_multi_tensor(hyper: Hyper, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
    """Adam and AdamW of FusedAdam; the states of masters and scales are the caller's."""
    betas, decoupled = (hyper.beta1, hyper.beta2), hyper.kind == "adamw"
    scalars = fused_adam.Scalars.from_hyperparameters(
        hyper.lr, betas, hyper.eps, hyper.weight_decay, step, decoupled=decoupled
    )
    fused_adam.step_tensor(scalars, param, grad, state)


def working(x: Array) -> F32:
    """`x` as fp32 to calculate with: itself where it is fp32 (then in-place operations update it), else a copy."""
    return x.astype(FP32, copy=False)


def _multiplier(hyper: Hyper, value: float, dtype: np.dtype[Any]) -> np.float32:
    """The scalar of an in-place multiplication as the implementation's kernel holds it."""
    return rounded_scalar(value, dtype) if hyper.impl == "foreach" else np.float32(value)


def add(x: F32, other: F32, alpha: float, dtype: np.dtype[Any]) -> F32:
    """`x + alpha * other` of storage dtype `dtype`, each of the two operations rounded: `torch.add`."""
    product = rounded(other * rounded_scalar(alpha, dtype), dtype)
    product += x
    return rounded(product, dtype)


def lerp(start: F32, end: F32, weight: float) -> F32:
    """`torch.lerp` in fp32: from the nearer end, so that a weight of 1 gives `end` exactly.

    For a weight of exactly 1 (beta1 = 0) and an end of -0.0 the sign of zero is that of torch's scalar tail.
    """
    w = np.float32(weight)
    span = end - start
    if w < 0.5:
        span *= w
        span += start
        return span
    span *= np.float32(1) - w
    np.subtract(end, span, out=span)
    return span


def _scaled_square(g: F32, scale: float) -> F32:
    """`(scale * g) * g` in fp32, the order of `torch.addcmul`."""
    product = g * np.float32(scale)
    product *= g
    return product


def _addcdiv(x: F32, numerator: F32, denominator: F32, scale: float) -> F32:
    """`x + (scale * numerator) / denominator` in fp32, the order of `torch.addcdiv`; overwrites `numerator`."""
    numerator *= np.float32(scale)
    numerator /= denominator
    numerator += x
    return numerator
