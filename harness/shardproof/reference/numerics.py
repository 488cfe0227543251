"""Floating-point building blocks of the reference: half-precision rounding and torch's square root.

Arrays are 1-D. Arithmetic is done in fp32 whatever the storage dtype; a half-precision operation is the fp32
operation followed by one rounding to the storage dtype (round to nearest, ties to even), which is what torch's
CPU kernels do and what ml_dtypes' and numpy's casts compute. The one fp32 operation where torch is not correctly
rounded is `sqrt`: it goes through MKL's vector math, so the reference calls it there.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

FP32 = np.dtype(np.float32)
FP16 = np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)

DTYPE: dict[str, np.dtype[np.generic]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp64": np.dtype(np.float64),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
    "fp8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
NAME = {dtype: name for name, dtype in DTYPE.items()}


def rounded(x: F32, to: np.dtype[Any]) -> F32:
    """Round every value of `x` to the nearest of dtype `to`, in place, and return `x` (fp32 still)."""
    if to != FP32:
        x[...] = x.astype(to)
    return x


def rounded_scalar(value: float, to: np.dtype[Any]) -> np.float32:
    """A python float as a kernel holds it after converting it to fp32 and then to dtype `to`."""
    single = np.float32(value)
    return single if to == FP32 else np.float32(to.type(single))


def torch_sqrt(x: F32, dtype: np.dtype[Any]) -> F32:
    """The square root as `torch.sqrt` computes it on a tensor of `dtype`; a new array.

    In fp32 torch's is up to 1 ULP off correct rounding. In half precision it is correctly rounded to fp32, then
    to `dtype`, which a test confirms for every value.
    """
    if dtype != FP32:
        return rounded(np.sqrt(x), dtype)
    root = x.copy()
    torch.from_numpy(root).sqrt_()
    return root
