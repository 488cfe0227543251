"""Chooses the exact grid from which a parameter's gradients are drawn, according to the dtypes of its stages.

`shardproof.probe` says what each kind of grid is, and draws from it. The choice lies apart from it so that a contract,
which names the grid, needs no numpy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """kind: `wide`, `narrow`, `cancelling`, `alternate`, `lone` or `uneven`. unit: the value of one unit, a power of
    two."""

    kind: str
    unit: float


LONE_GRID = Grid("lone", 2.0**-4)
"""Of a parameter that one rank alone uses: what it then contributes for all of them fits every dtype."""


UNEVEN_GRID = Grid("uneven", 2.0**-4)
"""Of a run in which one rank alone has a step's later microbatches, for all of them: the same."""


PARTIAL_GRID = Grid("narrow", 2.0**-4)
"""Of a parameter of whose gradient every tensor-parallel rank has a part: small, so that each part is as exact as it.
"""


def choose_grid(stage_dtypes: tuple[str, str, str], compute: str, dp: int, microbatches: int) -> Grid:
    """The most sensitive grid that is still exact in every declared stage.

    For example, gradients that are computed in bf16 and reduced in fp32 over four ranks get a `wide` grid: each rank's
    value fits into bf16's 8 bits, their sum needs about 14, and a library that reduces in bf16 after all loses some of
    them.

    Args:
        stage_dtypes: declared dtypes of accumulate, reduce and main gradient.
        compute: declared dtype of the forward and of the gradient it produces.
        dp: number of data-parallel ranks. microbatches: forward/backward passes a step.
    """
    accumulate, reduce, main_grad = stage_dtypes
    if accumulate == reduce == "fp32" and main_grad == "bf16" and compute != "fp16" and dp >= 3:
        return Grid("cancelling", 2.0**-4)
    if any(dtype != "fp32" for dtype in stage_dtypes):
        return Grid("narrow", 2.0**-4)
    if compute == "fp32" or dp > 1:
        return Grid("wide", 2.0**-12)
    return Grid("alternate", 2.0**-12) if microbatches > 1 else Grid("narrow", 2.0**-4)
