"""The form of FusedAdam's state in a state dict: always fp32, whatever dtype the live state has.

Scaled state is multiplied by its scale first, so that a file holds true values. A remainder, the low half of a master,
is stored as the int16 that it is.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from shardproof.observe.logical import Value
from shardproof.observe.record import NUMPY_NAME

IN_FP32 = frozenset({"master", "exp_avg", "exp_avg_sq"})
"""Roles that are stored in fp32 whatever dtype they are kept in."""

_ONE = np.float32(1)


def remainder(master: Value) -> Value:
    """What FusedAdam keeps of an fp32 master beside its bf16 parameter: the lower 16 bits."""
    words = np.frombuffer(master.data, "<u2").reshape(-1, 2)
    return Value("int16", master.shape, words[:, 0].tobytes())


def in_fp32(value: Value, scale: Value | None = None) -> Value:
    """A value as it is stored. scale: of each element, where the value is kept divided by one."""
    if value.dtype == "fp32":
        return value
    stored = np.frombuffer(value.data, ml_dtypes.bfloat16 if value.dtype == "bf16" else NUMPY_NAME[value.dtype])
    wide = stored.astype(np.float32)
    if scale is not None:
        with np.errstate(all="ignore"):
            factor = np.frombuffer(scale.data, np.float32)
            wide = wide * (factor if value.dtype == "fp16" else _ONE / (_ONE / factor))
    return Value("fp32", value.shape, wide.tobytes())
