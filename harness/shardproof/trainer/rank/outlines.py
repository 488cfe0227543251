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
"""Of an outline; of a tensor that would have more, the sums of its rows are kept, if these are not more."""


def outline_of(value: torch.Tensor | npt.NDArray[Any]) -> str:
    """The elements of a tensor or an array of one or two dimensions or, of one with more, the sums over all dimensions
    behind the second, as 32-bit numbers in base 64; of one of which these are too many, the sums of its rows; empty
    where there are none or too many, or they cannot be read.

    Source: `shardproof.trainer.lines.first_apart`, which reads it.
    """
    shape = tuple(value.shape)
    if prod(shape) < 2 or shape[0] > MOST_NUMBERS:
        return ""
    dims = 2 if prod(shape[:2]) <= MOST_NUMBERS else 1
    numbers = value if isinstance(value, np.ndarray) else numbers_of(value, bytes_of(value))
    if numbers is None:
        return ""
    with np.errstate(all="ignore"):
        whole = len(shape) <= dims
        sums = numbers if whole else numbers.astype(np.float64).reshape(*shape[:dims], -1).sum(-1)
        return b64encode(sums.astype(np.float32).tobytes()).decode()
