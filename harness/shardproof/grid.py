"""Chooses the exact grid from which a parameter's gradients are drawn, according to the dtypes of its stages.

`shardproof.probe` says what each kind of grid is, and draws from it. The choice lies apart from it so that a contract,
which names the grid, needs no numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, log2


@dataclass(frozen=True)
class Grid:
    """kind: `wide`, `narrow`, `cancelling` or `alternate`. unit: the value of one unit, a power of two.

    alone: when one data-parallel rank contributes for all of them. `lone`: in even iterations, to a parameter that the
    others then leave out. `uneven`: in every microbatch behind the first, which the others do not have. Empty: never.
    kind_alone: the kind that it then draws from.
    parted: every tensor-parallel rank computes a part of the gradient only, and the parts have to be added up. It
    changes what ranks contribute, and no mean: two grids that differ in nothing else are equal.
    """

    kind: str
    unit: float
    alone: str = ""
    kind_alone: str = ""
    parted: bool = field(default=False, compare=False)


UNIT = {"wide": 2.0**-12, "alternate": 2.0**-12, "narrow": 2.0**-4, "cancelling": 2.0**-4}
"""The value of one unit of each kind."""


SMALL_CLIP = 2.0**-4
"""Below this bound of a gradient norm gradients are made smaller too, as at the end of a training: there the 1e-6 that
every library adds to the norm counts, and with it where and how often it is added."""


def scale_for(clip: float, dtypes: str) -> float:
    """What gradients are multiplied by when they are clipped to a norm: a power of two, which changes no exactness.

    Args:
        clip: the bound, 0 for none. dtypes: the dtype policy; fp16 has no room for small gradients.
    """
    return 2.0 ** floor(log2(clip)) if 0.0 < clip < SMALL_CLIP and "fp16" not in dtypes else 1.0


def choose_grid(
    stage_dtypes: tuple[str, str, str], compute: str, dp: int, microbatches: int, alone: str = "",
    parted: bool = False, scale: float = 1.0,
) -> Grid:  # fmt: skip
    """The most sensitive grid that is still exact in every declared stage.

    For example, gradients that are computed in bf16 and reduced in fp32 over four ranks get a `wide` grid: each rank's
    value fits into bf16's 8 bits, their sum needs about 14, and a library that reduces in bf16 after all loses some of
    them.

    Args:
        stage_dtypes: declared dtypes of accumulate, reduce and main gradient.
        compute: declared dtype of the forward and of the gradient it produces.
        dp: number of data-parallel ranks. microbatches: forward/backward passes a step.
        alone: when one rank contributes for all, as in `Grid`.
        parted: whether the gradient is also a sum over more than one tensor-parallel rank. scale: see `scale_for`.
    """
    accumulate, reduce, main_grad = stage_dtypes
    sums_are_fp32 = accumulate == reduce == "fp32"
    by_rank = by_one = "narrow"
    if sums_are_fp32 and main_grad == "fp32":
        by_batch = "alternate" if microbatches > 1 else "narrow"
        by_rank = "wide" if compute == "fp32" or dp > 1 or parted else by_batch
        by_one = "wide" if compute == "fp32" or parted else by_batch
    elif sums_are_fp32 and main_grad == "bf16" and compute != "fp16" and dp >= (2 if parted else 3):
        by_rank = "cancelling"
    # What one rank contributes for all may be of another kind than what all do; they share the finer unit.
    unit = min(UNIT[by_rank], UNIT[by_one]) if alone else UNIT[by_rank]
    return Grid(by_rank, unit * scale, alone, by_one if alone else "", parted)
