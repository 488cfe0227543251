"""The exact grid: gradients that survive any order of reduction and any divisor, and show any demotion.

The problem: sums of floating-point numbers depend on their order, and libraries reduce in any order, before or after
they divide. A comparison bit for bit would be one of noise. The idea: draw gradients from a grid on which no sum or
average that is declared rounds at all, and on which the next narrower dtype would.

Each rank's contribution to a gradient is an integer number of units 2^-k. On average over the data-parallel ranks it is
`mean_units`, which depends on name, iteration, microbatch and index only, so that one unsharded twin serves every mesh.
Around that mean the ranks deviate, so that a reduction over the wrong ranks changes bits. For example, for the first
element of `up.weight` two ranks contribute -14848 and 14 units of 2^-12, that is -3.625 and 0.0034. Each number has few
enough digits for bf16. Their sum, -14834 units, is exact in fp32; a library that adds in bf16 after all gets -3.625,
and loses the 14.

*Exact*: every contribution is a multiple of the odd part of the number of data-parallel ranks (so that dividing by it
first is exact), and the sums of all positive and of all negative contributions stay below the significand of every
declared stage (so that every partial sum is exact, in any order).

*Sensitive*, by the kind of grid:

* `wide`: some ranks hold coarse values (multiples of 256 units) and the others fine ones, as above. Each contribution
  fits the 8 bits of bf16, their sum needs about 14: a stage that is declared fp32 but accumulates, reduces or stores in
  bf16 or fp16 changes bits.
* `narrow`: small values for all, for policies whose stages are declared half precision.
* `cancelling`: the narrow mean, for gradients that end in bf16 after a sum in fp32. Coarse values on two ranks cancel;
  a sum in bf16 that meets one of them before a fine value loses that value. It takes three ranks; with fewer, such a
  demotion shows in no gradient.
* `alternate`: for one contributor, several microbatches and half-precision compute. Even microbatches have the coarse
  values and odd ones the fine.

Two things change who contributes what; neither changes the mean, and both keep it as hard to add up:

* *Alone* (`Grid.alone`): one rank contributes the mean as often as there are ranks, and the others nothing. That is so
  for a parameter which, like an expert that a router seldom chooses, one rank alone uses in even iterations (`lone`),
  and where ranks have different numbers of microbatches (`uneven`).
* *Parted* (`Grid.parted`): every tensor-parallel rank has a part of each data-parallel rank's gradient, as of a norm
  under sequence parallelism. Some parts are coarse and the others fine. A library adds the parts up before or after it
  reduces over the data-parallel ranks; either sum needs more than bf16's 8 bits.

Pure numpy: used by ranks, reference and twin alike. It decides inputs, never expected results: the twin takes
`mean_units`, ranks take `rank_units`, and a property test ties the two together.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod

import numpy as np
import numpy.typing as npt

from shardproof.grid import Grid

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def element_keys(fqn: str, shape: tuple[int, ...], seed: int) -> U64:
    """One 64-bit key for each element, shape (numel,), from which all randomness of a tensor derives."""
    base = np.uint64((zlib.crc32(fqn.encode()) << 32) | (seed & 0xFFFFFFFF))
    with np.errstate(over="ignore"):
        return _mix((np.arange(1, prod(shape) + 1, dtype=np.uint64) * _GOLDEN) ^ _mix(base))


def element_keys_of(numels: Mapping[str, int], seed: int) -> dict[str, U64]:
    """`element_keys` of many tensors at once: fully qualified name → keys, given each one's number of elements."""
    bases = np.array([(zlib.crc32(fqn.encode()) << 32) | (seed & 0xFFFFFFFF) for fqn in numels], np.uint64)
    counts = list(numels.values())
    with np.errstate(over="ignore"):
        ramp = np.arange(1, max(counts, default=0) + 1, dtype=np.uint64) * _GOLDEN
    positions: U64 = np.concatenate([ramp[:n] for n in counts])
    keys = _mix(positions ^ np.repeat(_mix(bases), counts))
    return dict(zip(numels, np.split(keys, np.cumsum(counts)[:-1]), strict=True))


def initial_values(keys: U64, init_seed: int) -> npt.NDArray[np.float32]:
    """Initial parameter values in (-1, 1) with 24 significant bits, shape (numel,), fp32; never zero."""
    bits = _mix(keys ^ _salt(1, init_seed, 0)) >> np.uint64(40)
    return ((bits.astype(np.int64) * 2 - (1 << 24) + 1) * 2.0**-24).astype(np.float32)


RARE = (float("inf"), -0.0, 2.0**-130)
"""An infinity, a negative zero, and a number that is subnormal in fp32 and bf16 and a zero in fp16."""


def with_rare(values: npt.NDArray[np.float32], init_seed: int) -> npt.NDArray[np.float32]:
    """Initial values whose first ones are `RARE` in the first build; any other build has ordinary ones, so that a load
    is seen."""
    changed = values.copy()
    if init_seed == 0:
        changed[: len(RARE)] = RARE[: len(changed)]
    return changed


def mean_units(keys: U64, iteration: int, microbatch: int, grid: Grid) -> I64:
    """The gradient's mean over data-parallel ranks in units, shape (n,)."""
    coarse, fine = _targets(_hash(keys, iteration, microbatch), microbatch, _kind_at(grid, iteration, microbatch))
    return coarse * 256 + fine


def rank_units(keys: U64, iteration: int, microbatch: int, dp: int, grid: Grid) -> I64:
    """Every data-parallel rank's gradient in units, shape (dp, n); the mean over axis 0 is `mean_units`."""
    coarse, fine = _contributions(keys, iteration, microbatch, dp, grid)
    return coarse * 256 + fine


def part_units(keys: U64, iteration: int, microbatch: int, dp: int, tp: int, grid: Grid) -> I64:
    """What each tensor-parallel rank has of each data-parallel rank's gradient where all have parts (`Grid.parted`), in
    units, shape (dp, tp, n); the sum over axis 1 is `rank_units`. Each part can be divided by dp like the whole."""
    coarse, fine = _contributions(keys, iteration, microbatch, dp, grid)
    odd, hashed = _odd_part(dp), _hash(keys, iteration, microbatch) >> np.uint64(20)
    kind, at = _kind_at(grid, iteration, microbatch), np.arange(tp)
    parts = np.zeros((dp, tp, len(keys)), np.int64)
    for rank in range(dp):
        is_coarse = np.zeros(tp, bool)
        if kind == "wide":  # a chequerboard: a sum over either kind of ranks adds coarse and fine values
            is_coarse = (at + rank) % 2 == 0
        elif coarse[rank].any():  # cancelling: in one place for both, so that their sum is small in either order
            is_coarse = at == 0
        parts[rank, is_coarse] = _spread(coarse[rank] // odd, int(is_coarse.sum()), hashed, 1) * (256 * odd)
        parts[rank, ~is_coarse] = _spread(fine[rank] // odd, tp - int(is_coarse.sum()), hashed, 2) * odd
    return np.roll(parts, iteration + microbatch, axis=1)


def _contributions(keys: U64, iteration: int, microbatch: int, dp: int, grid: Grid) -> tuple[I64, I64]:
    """Every data-parallel rank's gradient: the coarse part, to be multiplied by 256, and the fine one, each of shape
    (dp, n)."""
    hashed, kind = _hash(keys, iteration, microbatch), _kind_at(grid, iteration, microbatch)
    coarse, fine = _targets(hashed, microbatch, kind)
    rows = np.zeros((2, dp, len(keys)), np.int64)
    alone = _alone(grid, iteration, microbatch, dp)
    if alone is not None:
        rows[:, alone] = coarse * dp, fine * dp
        return rows[0], rows[1]
    odd = _odd_part(dp)
    share = dp // odd
    ranks_coarse, ranks_fine = _holders(kind, dp, grid.parted)
    if kind == "cancelling":
        push = (((hashed >> np.uint64(12)) & np.uint64(7)).astype(np.int64) + 1) * odd
        rows[0, ranks_coarse] = push, -push
        rows[1, ranks_fine] = _spread(fine * share, len(rows[0, ranks_fine]), hashed >> np.uint64(16), 1) * odd
    elif kind == "wide":
        rows[0, ranks_coarse] = _spread(coarse * share, len(rows[0, ranks_coarse]), hashed >> np.uint64(12), 4) * odd
        rows[1, ranks_fine] = _spread(fine * share, len(rows[0, ranks_fine]), hashed >> np.uint64(28), 4) * odd
    else:
        rows[0, 0] = coarse * dp  # nothing, or all of one rank's
        rows[1] = _spread(fine * share, dp, hashed >> np.uint64(12), 1) * odd
    rows = np.roll(rows, iteration + microbatch, axis=1)
    return rows[0], rows[1]


def _holders(kind: str, dp: int, parted: bool) -> tuple[slice, slice]:
    """Which data-parallel ranks have a coarse value and which a fine one. A rank can have both where its gradient is a
    sum of parts, or where there is one rank."""
    every = slice(0, dp)
    if kind == "cancelling":
        return slice(0, dp, dp - 1), every if parted else slice(1, dp - 1)
    half = (dp + 1) // 2
    return (every, every) if parted or dp == 1 else (slice(0, half), slice(half, dp))


def _alone(grid: Grid, iteration: int, microbatch: int, dp: int) -> int | None:
    """The data-parallel rank that contributes the gradients of all; None where each contributes its own."""
    rule = {"lone": lone_rank, "uneven": extra_rank}.get(grid.alone)
    return rule(iteration, microbatch, dp) if rule else None


def _kind_at(grid: Grid, iteration: int, microbatch: int) -> str:
    return grid.kind if _alone(grid, iteration, microbatch, 1) is None else grid.kind_alone


def _odd_part(number: int) -> int:
    return number // (number & -number)


def lone_rank(iteration: int, microbatch: int, dp: int) -> int | None:
    """The only data-parallel rank that uses a parameter which the others leave out (`ParamSpec.idle`); None where all
    do."""
    return (iteration + microbatch) % dp if iteration % 2 == 0 else None


def extra_rank(iteration: int, microbatch: int, dp: int) -> int | None:
    """The only data-parallel rank that has a microbatch where ranks have different numbers of them (`grad_sync` is
    `uneven`); None for the first, which all have."""
    return (iteration + microbatch) % dp if microbatch else None


def _targets(hashed: U64, microbatch: int, kind: str) -> tuple[I64, I64]:
    """The mean's coarse part (to be multiplied by 256) and its fine part. Fine parts are odd, so that none is lost
    without a trace."""
    coarse = (hashed & np.uint64(63)).astype(np.int64) - 32
    fine = ((hashed >> np.uint64(6)) & np.uint64(31)).astype(np.int64) * 2 - 31
    zero = np.zeros_like(coarse)
    match kind:
        case "wide":
            return coarse, fine
        case "alternate":  # half as coarse: one rank may contribute it for up to eight, under two names
            return (coarse // 2, zero) if microbatch % 2 == 0 else (zero, fine)
        case "narrow" | "cancelling":
            small = (hashed & np.uint64(3)).astype(np.int64) * 2 - 3
            return zero, small
        case other:
            raise ValueError(f"unknown grid kind {other!r}")


def _spread(total: I64, ranks: int, hashed: U64, deviation: int) -> I64:
    """Split `total` (n,) over `ranks` rows with zero-sum deviations of up to `deviation`: shape (ranks, n)."""
    if not ranks:
        return np.zeros((0, len(total)), np.int64)
    base, rest = np.divmod(total, ranks)
    rows = base + (np.arange(ranks)[:, None] < rest)
    span = np.uint64(2 * deviation + 1)
    for pair in range(ranks // 2):
        push = ((hashed >> np.uint64(4 * pair)) % span).astype(np.int64) - deviation
        rows[2 * pair] += push
        rows[2 * pair + 1] -= push
    return rows


def _hash(keys: U64, iteration: int, microbatch: int) -> U64:
    return _mix(keys ^ _salt(2, iteration, microbatch))


def _salt(purpose: int, first: int, second: int) -> np.uint64:
    return np.uint64(((purpose << 48) | (first << 24) | second) * int(_GOLDEN) & 0xFFFFFFFFFFFFFFFF)


def _mix(x: U64 | np.uint64) -> U64:
    """splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * _MIX1
        x = (x ^ (x >> np.uint64(27))) * _MIX2
        return x ^ (x >> np.uint64(31))  # type: ignore[return-value]
