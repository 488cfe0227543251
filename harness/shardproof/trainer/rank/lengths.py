"""How long a gradient is, read from memory."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from shardproof.trainer.rank.looked_up import bytes_of
from shardproof.trainer.step.measured import Size

_FORMATS = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


def size_of(gradient: torch.Tensor | None) -> Size | None:
    """The size of the part that this rank has; None of what is no plain tensor of floats, or a large one."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    data = bytes_of(local) if local is not None else b""
    if not data or local is None:
        return None
    if local.dtype == torch.bfloat16:
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    elif local.dtype in _FORMATS:
        values = np.frombuffer(data, _FORMATS[local.dtype]).astype(np.float64)
    else:
        return None
    return float(values @ values), float(values @ _weights(len(values)))


@lru_cache(maxsize=64)
def _weights(number: int) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.cos(np.arange(1.0, number + 1))
    return weights
