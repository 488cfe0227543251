"""The numbers of a tensor in outline, by which what two ways make is held side by side though its shape differs."""

from __future__ import annotations

from base64 import b64encode
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardproof.trainer.rank.looked_up import bytes_of, numbers_of

MOST_NUMBERS = 256
"""Of an outline; a tensor that would have more has none."""


def outline_of(value: torch.Tensor | npt.NDArray[Any]) -> str:
    """The elements of a tensor or an array of one or two dimensions or, of one with more, the sums over all dimensions
    behind the second, as 32-bit numbers in base 64; empty where there are none or too many, or they cannot be read.

    Source: `shardproof.trainer.first_apart`, which reads it.
    """
    shape = tuple(value.shape)
    if prod(shape) < 2 or prod(shape[:2]) > MOST_NUMBERS:
        return ""
    numbers = value if isinstance(value, np.ndarray) else numbers_of(value, bytes_of(value))
    if numbers is None:
        return ""
    with np.errstate(all="ignore"):
        sums = numbers.astype(np.float64).reshape(*shape[:2], -1).sum(-1) if len(shape) > 2 else numbers
        return b64encode(sums.astype(np.float32).tobytes()).decode()
