"""One step of FusedAdam (apex, TransformerEngine) on one tensor, in every mode, in IEEE arithmetic.

    g ← g + decay · p                     L2 mode (`adam`)
    m ← b1 · m + (1 - b1) · g
    v ← b2 · v + ((1 - b2) · g) · g
    u ← (m / c1) / (√(v / c2) + eps)      + decay · p in AdamW mode
    p ← p - lr · u

All scalars are fp32; c1 and c2 are `1 - beta ** step` of the fp32 beta in double precision, then rounded, or 1 without
bias correction. Every operation above is fp32 with one rounding; the update takes m and v as just computed, and the
parameter is rounded from the p just computed, before either is rounded to what it is stored as.

Stored states: fp32 and bf16 as they are; fp16 and fp8 (E4M3) scaled, so that the largest magnitude of a domain comes to
the top of a range; a master as fp32, as scaled fp16, or as the 16 low bits that a bf16 parameter lacks. See
docs/fused-adam.md. Source: TransformerEngine `common/multi_tensor/adam.cu`, `pytorch/optimizers/fused_adam.py` (2.10 to
2.20.2). The reference shares this module with nobody: the twin steps with the emulated optimizer.

*Does not know* what a GPU makes of it: the kernels are compiled with fast math.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shardproof.reference.numerics import BF16, F32, FP16, FP32, Array

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
INT16 = np.dtype(np.int16)
TOP: Mapping[np.dtype[Any], float] = {FP16: 65504.0 / 2, FP8: 448.0}
"""By the dtype of a scaled state, the number that the largest magnitude of a domain is stored as."""

Domains = npt.NDArray[np.int64]
"""For each element the number of its domain. Elements with the same number share a scale."""


@dataclass(frozen=True)
class Scalars:
    """The kernel's arguments, rounded to fp32 as it takes them. decoupled: AdamW mode."""

    lr: np.float32
    beta1: np.float32
    beta2: np.float32
    eps: np.float32
    decay: np.float32
    correction1: np.float32
    correction2: np.float32
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
    ) -> Scalars:
        """step: number of this step, from 1."""
        beta1, beta2 = np.float32(betas[0]), np.float32(betas[1])
        corrections = (_correction(beta1, step), _correction(beta2, step)) if bias_correction else (_ONE, _ONE)
        return cls(np.float32(lr), beta1, beta2, np.float32(eps), np.float32(weight_decay), *corrections, decoupled)


_ONE = np.float32(1.0)


def _correction(beta: np.float32, step: int) -> np.float32:
    return np.float32(1.0 - math.pow(float(beta), step))


@np.errstate(all="ignore")
def adam(scalars: Scalars, grad: Array, param: Array, exp_avg: Array, exp_avg_sq: Array) -> tuple[Array, Array, Array]:
    """`(param, exp_avg, exp_avg_sq)` after one step of fp32 values, shape (n,) each; the arguments stay unchanged."""
    s = scalars
    if not s.decoupled:
        grad = grad + s.decay * param
    m = s.beta1 * exp_avg + (_ONE - s.beta1) * grad
    v = s.beta2 * exp_avg_sq + (_ONE - s.beta2) * grad * grad
    change = (m / s.correction1) / (np.sqrt(v / s.correction2) + s.eps)
    if s.decoupled:
        change = change + s.decay * param
    return param - s.lr * change, m, v


@np.errstate(all="ignore")
def step_tensor(
    scalars: Scalars, param: Array, grad: Array, state: dict[str, Array], domains: Domains | None = None
) -> None:
    """One step of one tensor in place, with its states as they are stored.

    Args:
        param: shape (n,), fp32, bf16 or fp16. Updated.
        grad: shape (n,), any float dtype.
        state: `exp_avg` and `exp_avg_sq`, shape (n,), any dtype of the module's text; optionally `master_param`: fp32
            or fp16 beside a half-precision `param`, or int16 beside a bf16 one; for every fp16 or fp8 state its
            scales under `<name>.scale`, fp32, shape (n,). Updated.
        domains: shape (n,); None: the tensor is one domain.
    """
    m, v = (unscaled(state[name], state.get(f"{name}.scale")) for name in ("exp_avg", "exp_avg_sq"))
    master = state.get("master_param")
    if master is None or param.dtype == FP32:
        new, m, v = adam(scalars, grad.astype(FP32), param.astype(FP32), m, v)
        param[...] = new
    elif master.dtype == INT16:
        new, m, v = adam(scalars, grad.astype(FP32), joined(param, master), m, v)
        param[...], master[...] = split(new)
    else:
        old = unscaled(master, state.get("master_param.scale"))
        new, m, v = adam(scalars, grad.astype(FP32), old, m, v)
        param[...] = new
        store(state, "master_param", new, domains)
    store(state, "exp_avg", m, domains)
    store(state, "exp_avg_sq", v, domains)


def joined(param: Array, remainder: Array) -> F32:
    """The fp32 masters of bf16 parameters and the low halves of their bits, taken as signed: where one is negative, the
    parameter was rounded up."""
    low = remainder.view(np.uint16).astype(np.uint32)
    high = param.view(np.uint16) - (remainder < 0).astype(np.uint16)
    whole: F32 = (high.astype(np.uint32) << np.uint32(16) | low).view(FP32)
    return whole


def split(master: Array) -> tuple[Array, Array]:
    """`(bf16 parameters, int16 low halves)` of fp32 masters: rounded to nearest, ties away from zero."""
    bits = np.ascontiguousarray(master).view(np.uint32)
    low = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(INT16)
    high = (bits >> np.uint32(16)).astype(np.uint16) + (low < 0).astype(np.uint16)
    return high.view(BF16), low


@np.errstate(all="ignore")
def unscaled(stored: Array, scale: Array | None) -> Array:
    """A stored state in fp32. scale: shape of `stored`; None where the dtype has none."""
    values = stored.astype(FP32)
    if stored.dtype == FP16:
        assert scale is not None
        return values * scale
    if stored.dtype == FP8:
        assert scale is not None
        # TransformerEngine keeps 1 / scale of an fp8 tensor, and inverts that again
        return values * (_ONE / (_ONE / scale))
    return values


@np.errstate(all="ignore")
def scaled(values: Array, dtype: np.dtype[Any], domains: Domains | None = None) -> tuple[Array, Array]:
    """`(stored, scale)` of fp32 values in fp16 or fp8, shape (n,) each. A domain's scale is its largest magnitude over
    `TOP`.

    A domain with a NaN in it has a NaN for a scale. A domain of zeros has the scale 0, never -0: it is the larger of
    minus the least and the greatest value, and a GPU takes 0 for larger than -0
    (`shardproof.emulation.kernels.maximum`). TransformerEngine multiplies an fp8 domain of zeros by the infinite
    inverse of that and stores NaN, which is a defect; here zeros stay zeros.
    """
    ids = np.zeros(values.shape, np.int64) if domains is None else domains
    _, index = np.unique(ids, return_inverse=True)
    largest = np.zeros(index.max(initial=0) + 1, np.float32)
    np.maximum.at(largest, index, np.abs(values))
    scale = (largest / np.float32(TOP[dtype]))[index]
    inverse = np.where(scale == 0, np.float32(0), _ONE / scale)
    if dtype == FP8:
        return np.clip(values * inverse, -TOP[FP8], TOP[FP8]).astype(FP8), scale
    return (values * np.where(scale > 0, inverse, np.float32(0))).astype(FP16), scale


def store(state: dict[str, Array], name: str, values: Array, domains: Domains | None = None) -> None:
    """Put fp32 values into a state, in the dtype that it has, and its scales beside it."""
    dtype = state[name].dtype
    if dtype in TOP:
        state[name][...], state[f"{name}.scale"][...] = scaled(values, dtype, domains)
    else:
        with np.errstate(all="ignore"):
            state[name][...] = values
