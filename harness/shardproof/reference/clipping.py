"""Clipping by global norm as the reference does it, in numpy. The twin has its own (`shardproof.oracle.clipping`).

Each function takes the sum of the squares of all gradients, exact in double precision, and the dtypes of the gradients.
It returns the total norm as the system reports it, and the coefficient that every gradient is multiplied by in fp32;
None where they stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from shardproof.oracle.inputs import Clip
from shardproof.reference.numerics import DTYPE


def as_torch(squares: float, dtypes: Collection[str], clip: Clip) -> tuple[float, np.float32 | None]:
    """`inputs.TORCH_CLIPPING`: the norm is exact but for one rounding to the gradients' common dtype, and every
    operation is rounded to that."""
    common = DTYPE[next(iter(dtypes))] if len(dtypes) == 1 else DTYPE["fp32"]
    norm = common.type(np.sqrt(squares))
    padded = np.float32(norm + common.type(1e-6))  # type: ignore[operator]
    inverse = np.float32(common.type(np.float32(1) / padded))
    return float(norm), min(np.float32(common.type(inverse * np.float32(clip.bound))), np.float32(1))


def in_double(squares: float, dtypes: Collection[str], clip: Clip) -> tuple[float, np.float32 | None]:
    """The rule `inputs.DOUBLE_CLIPPING`."""
    norm = float(np.sqrt(squares))
    coefficient = clip.bound / (norm + 1e-6)
    return norm, np.float32(coefficient) if coefficient < 1.0 else None
