"""The grid's two promises: exact in any order under any divisor, and sensitive to a demotion at any stage."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.grid import Grid, choose_grid, scale_for
from shardproof.probe import element_keys, extra_rank, initial_values, lone_rank, mean_units, part_units, rank_units

SIGNIFICAND = {"fp32": 1 << 24, "fp16": 1 << 11, "bf16": 1 << 8}
NUMPY = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
MICROBATCHES, USES = 3, 2

fqns = st.text("abcdefgh.0123456789", min_size=1, max_size=12)
seeds = st.integers(0, 2**31)
iterations = st.integers(0, 20)
microbatches = st.integers(0, MICROBATCHES - 1)
ranks = st.integers(1, 8)
ALONE = tuple((alone, kind) for alone in ("lone", "uneven") for kind in ("wide", "alternate", "narrow"))
KINDS = {
    **{kind: Grid(kind, 1.0) for kind in ("wide", "narrow", "cancelling")},
    **{f"{alone}, {kind}": Grid("narrow" if kind == "narrow" else "wide", 1.0, alone, kind) for alone, kind in ALONE},
}
kinds = st.sampled_from(sorted(KINDS))
half_kinds = ("narrow", "lone, narrow", "uneven, narrow")


def contributions(fqn: str, seed: int, iteration: int, microbatch: int, dp: int, kind: str) -> npt.NDArray[np.int64]:
    kind = "narrow" if kind == "cancelling" and dp < 3 else kind
    return rank_units(element_keys(fqn, (40, 25), seed), iteration, microbatch, dp, KINDS[kind])


def inexact(units: npt.NDArray[np.int64], dtype: str) -> npt.NDArray[np.bool_]:
    """Which values do not survive a cast to `dtype` and back; in units of 2^-12, so that fp16 does not overflow."""
    values = units * 2.0**-12
    return values != values.astype(np.float32).astype(NUMPY[dtype]).astype(np.float64)


@given(fqns, seeds, iterations, microbatches, ranks, kinds)
def test_the_mean_over_ranks_is_the_twins_gradient_on_every_mesh(
    fqn: str, seed: int, iteration: int, microbatch: int, dp: int, kind: str
) -> None:
    mean = mean_units(element_keys(fqn, (40, 25), seed), iteration, microbatch, KINDS[kind])
    assert (contributions(fqn, seed, iteration, microbatch, dp, kind).sum(axis=0) == dp * mean).all()


@given(fqns, seeds, iterations, microbatches, ranks, kinds)
def test_a_division_before_the_reduction_is_exact(
    fqn: str, seed: int, iteration: int, microbatch: int, dp: int, kind: str
) -> None:
    units = contributions(fqn, seed, iteration, microbatch, dp, kind)
    assert (units % (dp // (dp & -dp)) == 0).all()


@pytest.mark.parametrize("dp", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "fp32") for kind in KINDS), *((kind, dtype) for kind in half_kinds for dtype in ("bf16", "fp16"))],
)
@given(seed=seeds, iteration=iterations)
def test_every_partial_sum_fits_the_declared_dtype(kind: str, dtype: str, dp: int, seed: int, iteration: int) -> None:
    """In any order: the sum of all positive contributions and that of all negative ones bound every partial sum."""
    parts = [
        contributions(name, seed, iteration, microbatch, dp, kind)
        for microbatch in range(MICROBATCHES)
        for name in ("tied.first", "tied.second")[:USES]
    ]
    assert np.maximum(parts, 0).sum(axis=(0, 1)).max() < SIGNIFICAND[dtype]
    assert np.minimum(parts, 0).sum(axis=(0, 1)).min() > -SIGNIFICAND[dtype]


@given(seeds, iterations, microbatches, st.integers(2, 8))
def test_on_a_wide_grid_what_one_rank_holds_fits_half_precision(
    seed: int, iteration: int, microbatch: int, dp: int
) -> None:
    """Also where two names of a tied parameter add up in the compute dtype before the reduction."""
    first, second = (contributions(name, seed, iteration, microbatch, dp, "wide") for name in ("one", "two"))
    for units in (first, second, first + second):
        assert not inexact(units, "bf16").any()
        assert not inexact(units, "fp16").any()


@given(seeds, iterations, microbatches, st.integers(2, 8), st.sampled_from(("bf16", "fp16")))
def test_a_half_precision_reduction_of_a_wide_grid_changes_bits(
    seed: int, iteration: int, microbatch: int, dp: int, dtype: str
) -> None:
    total = contributions("weight", seed, iteration, microbatch, dp, "wide").sum(axis=0)
    assert inexact(total, dtype).mean() >= 0.25


@given(seeds, iterations, st.sampled_from(("bf16", "fp16")))
def test_a_half_precision_accumulation_of_an_alternate_grid_changes_bits(seed: int, iteration: int, dtype: str) -> None:
    keys = element_keys("weight", (40, 25), seed)
    coarse, fine = (rank_units(keys, iteration, microbatch, 1, Grid("alternate", 1.0))[0] for microbatch in (0, 1))
    assert not inexact(coarse, dtype).any()
    assert not inexact(fine, dtype).any()
    assert inexact(coarse + fine, dtype).mean() >= 0.25


@given(seeds, iterations, microbatches, st.integers(2, 8), st.sampled_from(("wide", "narrow", "cancelling")))
def test_ranks_differ_so_that_a_reduction_over_the_wrong_ranks_changes_bits(
    seed: int, iteration: int, microbatch: int, dp: int, kind: str
) -> None:
    units = contributions("weight", seed, iteration, microbatch, dp, kind)
    for rank in range(1, dp):
        assert (units[rank] != units[0]).any()


@given(seeds, iterations)
def test_names_steps_and_microbatches_have_gradients_of_their_own(seed: int, iteration: int) -> None:
    grid = Grid("wide", 1.0)
    base = mean_units(element_keys("a", (50,), seed), iteration, 0, grid)
    assert (base != mean_units(element_keys("b", (50,), seed), iteration, 0, grid)).any()
    assert (base != mean_units(element_keys("a", (50,), seed), iteration + 1, 0, grid)).any()
    assert (base != mean_units(element_keys("a", (50,), seed), iteration, 1, grid)).any()
    assert (base != 0).all()


@given(fqns, seeds)
def test_initial_values_fill_the_fp32_significand_and_differ_between_builds(fqn: str, seed: int) -> None:
    keys = element_keys(fqn, (200,), seed)
    first, second = initial_values(keys, 0), initial_values(keys, 1)
    assert first.dtype == np.float32
    assert (np.abs(first) < 1).all()
    assert (first != 0).all()
    assert (first != second).any()
    assert (first != first.astype(ml_dtypes.bfloat16).astype(np.float32)).mean() > 0.9


@pytest.mark.parametrize(
    ("stages", "compute", "dp", "microbatches", "kind"),
    [
        (("fp32", "fp32", "fp32"), "fp32", 1, 1, "wide"),
        (("fp32", "fp32", "fp32"), "bf16", 4, 1, "wide"),
        (("fp32", "fp32", "fp32"), "bf16", 1, 2, "alternate"),
        (("fp32", "fp32", "fp32"), "bf16", 1, 1, "narrow"),
        (("fp32", "bf16", "fp32"), "fp32", 4, 2, "narrow"),
        (("fp32", "fp32", "bf16"), "bf16", 3, 1, "cancelling"),
        (("fp32", "fp32", "bf16"), "bf16", 2, 3, "narrow"),
        (("fp32", "fp32", "fp16"), "fp32", 4, 2, "narrow"),
    ],
)
def test_the_most_sensitive_exact_grid_is_chosen(
    stages: tuple[str, ...], compute: str, dp: int, microbatches: int, kind: str
) -> None:
    assert choose_grid(stages, compute, dp, microbatches).kind == kind


@pytest.mark.parametrize(
    ("clip", "dtype", "scale"),
    [
        (0.0, "fp32", 1.0),
        (1.0, "fp32", 1.0),
        (0.1, "bf16", 1.0),
        (0.001, "bf16/master=fp32", 2.0**-10),
        (0.001, "fp16", 1.0),
    ],
)
def test_gradients_are_small_where_the_clip_is_and_fp16_is_not(clip: float, dtype: str, scale: float) -> None:
    assert scale_for(clip, dtype) == scale
    small = choose_grid(("fp32", "fp32", "fp32"), "fp32", 2, 1, scale=scale)
    assert small.unit == choose_grid(("fp32", "fp32", "fp32"), "fp32", 2, 1).unit * scale


def test_an_unknown_grid_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown grid kind 'round'"):
        mean_units(element_keys("a", (3,), 0), 0, 0, Grid("round", 1.0))


@given(seeds, iterations, microbatches, st.integers(3, 8))
def test_on_a_cancelling_grid_a_sum_in_bf16_loses_fine_values(
    seed: int, iteration: int, microbatch: int, dp: int
) -> None:
    """In rank order; each contribution by itself, and the mean, fit bf16."""
    units = contributions("x", seed, iteration, microbatch, dp, "cancelling").astype(np.float32)
    assert (units == units.astype(NUMPY["bf16"]).astype(np.float32)).all()
    summed = units[0]
    for one in units[1:]:
        summed = (summed + one).astype(NUMPY["bf16"]).astype(np.float32)
    adjacent = (iteration + microbatch) % dp == 1  # the two coarse values follow each other and cancel at once
    assert adjacent or (summed != units.sum(axis=0)).mean() > 0.03


uneven_kinds, lone_kinds = (st.sampled_from([k for k in KINDS if k.startswith(alone)]) for alone in ("uneven", "lone"))


@given(fqns, seeds, iterations, microbatches, ranks, uneven_kinds)
def test_of_an_uneven_step_one_rank_has_all_behind_the_first_microbatch(
    fqn: str, seed: int, iteration: int, microbatch: int, dp: int, kind: str
) -> None:
    units = contributions(fqn, seed, iteration, microbatch, dp, kind)
    alone = extra_rank(iteration, microbatch, dp)
    assert (alone is None) == (microbatch == 0)
    if alone is not None:
        assert (units[alone] != 0).mean() > (0.9 if "alternate" in kind and microbatch % 2 == 0 else 0.9999)
        assert not np.delete(units, alone, axis=0).any()


@given(fqns, seeds, iterations, microbatches, ranks, lone_kinds)
def test_of_a_lone_parameter_one_rank_has_all_in_even_iterations(
    fqn: str, seed: int, iteration: int, microbatch: int, dp: int, kind: str
) -> None:
    units = contributions(fqn, seed, iteration, microbatch, dp, kind)
    alone = lone_rank(iteration, microbatch, dp)
    assert (alone is None) == (iteration % 2 == 1)
    if alone is not None:
        assert (units[alone] != 0).mean() > (0.9 if "alternate" in kind and microbatch % 2 == 0 else 0.9999)
        assert not np.delete(units, alone, axis=0).any()


@given(seeds, st.integers(0, 10), ranks, st.sampled_from(("lone", "uneven")))
def test_what_one_rank_contributes_for_all_loses_bits_in_half_precision(
    seed: int, half_iteration: int, dp: int, alone: str
) -> None:
    """It comes from one rank, so that a demotion shows in the value itself, or in the sum of several microbatches where
    the rank computes in half precision too. One microbatch of half-precision values has no bits to lose."""
    keys = element_keys("weight", (40, 25), seed)
    batches = (1, 2)  # behind the first, which all ranks have where they have different numbers
    for compute in ("fp32", "bf16"):
        grid = choose_grid(("fp32",) * 3, compute, dp, MICROBATCHES, alone)
        every = [rank_units(keys, 2 * half_iteration, m, dp, grid).sum(axis=0) for m in batches]
        assert compute == "fp32" or not any(inexact(units, compute).any() for units in every)
        for dtype in ("bf16", "fp16"):
            assert inexact(sum(every, np.zeros_like(every[0])), dtype).mean() >= 0.25


parted_kinds = st.sampled_from(("wide", "narrow", "cancelling"))


@given(fqns, seeds, iterations, microbatches, st.integers(2, 8), st.integers(2, 4), parted_kinds)
def test_parts_over_tensor_parallel_ranks_are_the_whole_and_as_exact(
    fqn: str, seed: int, iteration: int, microbatch: int, dp: int, tp: int, kind: str
) -> None:
    keys, grid = element_keys(fqn, (40, 25), seed), Grid(kind, 1.0, parted=True)
    parts, rows = (
        part_units(keys, iteration, microbatch, dp, tp, grid),
        rank_units(keys, iteration, microbatch, dp, grid),
    )
    assert parts.shape == (dp, tp, len(keys))
    assert (parts.sum(axis=1) == rows).all()
    assert (rows.sum(axis=0) == dp * mean_units(keys, iteration, microbatch, grid)).all()
    assert (parts % (dp // (dp & -dp)) == 0).all(), "a division before the sum is exact"
    assert np.abs(parts).sum(axis=(0, 1)).max() * MICROBATCHES * USES < SIGNIFICAND["fp32"]
    assert not inexact(parts, "bf16").any()
    if kind != "wide":
        assert not inexact(parts.sum(axis=0), "bf16").any(), "a main gradient in bf16 holds the sum of each part"
    assert (parts[:, 0] != rows).mean() > 0.2, "a part is not the whole"


@given(seeds, iterations, microbatches, ranks, st.integers(2, 4), st.sampled_from(("fp32", "bf16")))
def test_either_sum_of_parts_loses_bits_in_half_precision(
    seed: int, iteration: int, microbatch: int, dp: int, tp: int, dtype: str
) -> None:
    """A library may add tensor-parallel parts up first or last: both sums, and the last of both, lose bits in bf16."""
    keys = element_keys("norm", (40, 25), seed)
    grid = choose_grid(("fp32",) * 3, dtype, dp, 1, parted=True)
    parts = part_units(keys, iteration, microbatch, dp, tp, grid)
    assert inexact(parts.sum(axis=1), "bf16").mean() > 0.25
    assert inexact(parts.sum(axis=(0, 1)), "bf16").mean() > 0.25
    if dp > 1:
        assert inexact(parts.sum(axis=0), "bf16").mean() > 0.25


@given(seeds, iterations, microbatches, st.integers(2, 8), st.integers(2, 4))
def test_before_a_main_gradient_in_bf16_the_sum_over_parts_loses_bits_in_bf16(
    seed: int, iteration: int, microbatch: int, dp: int, tp: int
) -> None:
    grid = choose_grid(("fp32", "fp32", "bf16"), "bf16", dp, 1, parted=True)
    sums = part_units(element_keys("norm", (40, 25), seed), iteration, microbatch, dp, tp, grid).sum(axis=1)
    assert inexact(sums, "bf16").mean() > 0.25 / dp
