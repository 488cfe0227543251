"""The differ, field by field: what each kind of difference says, whole.

*Verifies*: every field of a difference, of each kind, against what the two values have.
*Does not verify*: properties over many values (`test_diff.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shardproof.diff import LAZY_STATE, NOTHING, RUNS, Difference, diff, digest, norm_bound, numpy_dtype
from shardproof.observe.logical import Key, Problem, Value
from shardproof.observe.record import Record

KEY = Key(2, "live", "param", "a.weight")
ZERO = "all bits zero, at step 0"


def value(dtype: str, numbers: object) -> Value:
    array = np.asarray(numbers).astype(numpy_dtype(dtype))
    return Value(dtype, array.shape, array.tobytes())


ONE = value("fp32", [1.0])


def test_what_is_missing_and_what_is_too_much() -> None:
    held = value("fp32", [[3.0, 4.0]])
    (found,) = diff({KEY: held}, {})
    same = {"mismatched": 2, "total": 2}
    assert found == Difference(KEY, "missing", **same, expected_digest=digest(held), expected_first="3.0 (0x40400000)")
    extra = KEY._replace(fqn="b")
    (found,) = diff({KEY: ONE}, {KEY: ONE, extra: held})
    assert found == Difference(extra, "extra", **same, observed_digest=digest(held), observed_first="3.0 (0x40400000)")


def test_a_value_without_an_element_has_no_first_one() -> None:
    empty = Key(2, "live", "param", "empty")
    (found,) = diff({KEY: ONE, empty: value("fp32", [])}, {KEY: ONE})
    none = digest(value("fp32", []))
    assert found == Difference(empty, "missing", expected_digest=none, detail=ZERO)
    text = Key(2, "live", "warning", "rank0")
    (found,) = diff({KEY: ONE, text: Value("utf8", (0,), b"")}, {KEY: ONE})
    assert found.expected_first == ""


def test_another_dtype_and_another_shape() -> None:
    wanted, got = value("fp32", [[1.0, 2.0]]), value("bf16", [5.0, 6.0, 7.0])
    (found,) = diff({KEY: wanted}, {KEY: got})
    assert found == Difference(
        KEY, "dtype", mismatched=2, total=2, expected_digest=digest(wanted), observed_digest=digest(got),
        expected_first="1.0 (0x3f800000)", observed_first="5.0 (0x40a0)",
        detail="dtype bf16 instead of fp32, shape [3] instead of [1, 2]",
    )  # fmt: skip
    (found,) = diff({KEY: wanted}, {KEY: value("bf16", [[1.0, 2.0]])})
    assert (found.kind, found.detail) == ("dtype", "dtype bf16 instead of fp32")
    (found,) = diff({KEY: wanted}, {KEY: value("fp32", [1.0, 2.0])})
    assert (found.kind, found.detail) == ("shape", "shape [2] instead of [1, 2]")


def test_other_bits() -> None:
    wanted, got = value("fp16", [1.0, 2.0, 3.0, 4.0, 5.0]), value("fp16", [1.0, 2.0, 7.0, 9.0, 5.0])
    (found,) = diff({KEY: wanted}, {KEY: got})
    assert found == Difference(
        KEY, "bits", mismatched=2, total=5, first_index=(2,), last_index=(3,), max_ulp=1280,
        ulp_histogram=(("1024-2047", 2),), expected_digest=digest(wanted), observed_digest=digest(got),
        expected_first="3.0 (0x4200)", observed_first="7.0 (0x4700)", runs=((2, 2),),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bool", "utf8"])
def test_what_has_no_distance_has_no_nan_either(dtype: str) -> None:
    (found,) = diff({KEY: Value(dtype, (2,), b"\0\1")}, {KEY: Value(dtype, (2,), b"\0\0")})
    assert (found.max_ulp, found.nan_mismatches, found.ulp_histogram) == (None, 0, ())
    (found,) = diff({KEY: value("int64", [1, 4])}, {KEY: value("int64", [1, 7])})
    assert (found.max_ulp, found.nan_mismatches, found.ulp_histogram) == (3, 0, (("2-3", 1),))


def test_distances_by_power_of_two() -> None:
    (found,) = diff({KEY: value("int64", range(1, 9))}, {KEY: value("int64", [1, 3, 4, 6, 8, 10, 14, 16])})
    assert found.ulp_histogram == (("1", 2), ("2-3", 2), ("4-7", 2), ("8-15", 1))


def test_runs_of_what_deviates() -> None:
    right = np.zeros(400, np.float32)
    wrong = right.copy()
    wrong[[0, 1, 2, 5, 7, 8]] = 1
    (found,) = diff({KEY: value("fp32", right)}, {KEY: value("fp32", wrong)})
    assert found.runs == ((0, 3), (5, 1), (7, 2))
    wrong[:] = 0
    wrong[3::2] = 1
    (found,) = diff({KEY: value("fp32", right)}, {KEY: value("fp32", wrong)})
    assert found.runs == tuple((at, 1) for at in range(3, 3 + 2 * RUNS, 2))


def test_nothing_to_compare_is_a_difference() -> None:
    detail = "nothing to compare: no expected value has any element"
    assert diff({}, {}) == [Difference(NOTHING, "missing", detail=detail)]
    empty = {KEY: value("fp32", [])}
    assert diff(empty, empty) == [Difference(NOTHING, "missing", detail=detail)]


def test_a_problem_of_assembly_says_what_it_is_about() -> None:
    problem = Problem(KEY, "overlap", (1,), "two ranks hold [0:1]")
    (found,) = diff({KEY: ONE}, {KEY: ONE}, [problem])
    assert found == Difference(
        KEY, "overlap", (1,), total=1, expected_digest=digest(ONE), detail="two ranks hold [0:1]"
    )
    unknown = replace(problem, key=KEY._replace(fqn="nobody"))
    (found,) = diff({KEY: ONE}, {KEY: ONE}, [unknown])
    assert found == Difference(unknown.key, "overlap", (1,), detail="two ranks hold [0:1]")


def test_norms_have_bounds_of_their_own() -> None:
    norm, grad = KEY._replace(role="norm", fqn="total_norm"), KEY._replace(role="grad")
    (found,) = diff({norm: value("fp32", 3.0)}, {norm: value("fp32", 4.0)})
    assert (found.kind, found.detail) == ("norm", "more than 128 ULPs of fp32 from the exact norm")
    assert norm_bound(norm, {}) == norm_bound(norm, {grad: value("fp64", [1.0])}) == 128
    elsewhere = {grad._replace(op=1): value("bf16", [1.0]), KEY: value("bf16", [1.0])}
    assert norm_bound(norm, elsewhere) == 128
    for ulps, fails in ((128 << 29, False), ((128 << 29) + 1, True)):
        far = Value("fp64", (), (np.array(3.0).view(np.uint64) + np.uint64(ulps)).tobytes())
        assert bool(diff({norm: value("fp64", 3.0)}, {norm: far})) is fails


def test_a_difference_that_a_contract_allows_comes_last_and_says_why() -> None:
    state, gone = KEY._replace(role="exp_avg"), KEY._replace(fqn="zzz", op=5)
    found = diff({KEY: ONE, state: value("fp32", [0.0]), gone: ONE}, {KEY: ONE}, equivalences=[LAZY_STATE])
    assert [(d.key, d.kind) for d in found] == [(gone, "missing"), (state, "equivalent")]
    assert found[1].detail == f"absent against zeros at step 0: {LAZY_STATE.source}"


def test_a_count_in_a_param_group_is_a_step() -> None:
    counts = Key(2, "live", "hyperparameter", "group0.step")
    assert LAZY_STATE.covers(counts)
    for other in (
        counts._replace(fqn="group0.lr"), counts._replace(role="setting"), counts._replace(fqn="group0.steps")
    ):  # fmt: skip
        assert not LAZY_STATE.covers(other)
    assert LAZY_STATE.covers(counts._replace(role="step"))


def test_state_at_a_step_is_not_nothing() -> None:
    state, step = KEY._replace(role="exp_avg"), KEY._replace(role="step")
    zeros, counted, fresh = value("fp32", [0.0]), value("fp32", 3.0), value("fp32", 0.0)
    for held in ({KEY: ONE, state: zeros, step: counted}, {KEY: ONE, state: value("uint8", list(b"XX")), step: fresh}):
        for expected, observed in ((held, {KEY: ONE}), ({KEY: ONE}, held)):
            failing = {d.key for d in diff(expected, observed, equivalences=[LAZY_STATE]) if d.fails}
            assert state in failing
    # X in the bytes of a count of the other side, which nobody may strip off
    kept = {KEY: ONE, step: Value("utf8", (1,), b"X")}
    (found, _) = diff({KEY: ONE, state: zeros}, kept, equivalences=[LAZY_STATE])
    assert found.key in (state, step)
    assert {d.key for d in diff({KEY: ONE, state: zeros}, kept, equivalences=[LAZY_STATE]) if d.fails} == {state, step}


def test_a_scale_without_its_moment_is_judged_by_itself() -> None:
    scale = Key(2, "live", "quant_scale", "a.weight.exp_avg")
    (found,) = diff({KEY: ONE, scale: value("fp32", 0.0)}, {KEY: ONE}, equivalences=[LAZY_STATE])
    assert found.detail.startswith("absent against zeros")
    (found,) = diff({KEY: ONE, scale: value("fp32", 2.0)}, {KEY: ONE}, equivalences=[LAZY_STATE])
    assert (found.kind, found.detail) == ("missing", "")


def test_a_digest_has_sixteen_digits_and_is_of_dtype_and_shape_too() -> None:
    flat, square = value("fp32", [1.0, 2.0, 3.0, 4.0]), value("fp32", [[1.0, 2.0], [3.0, 4.0]])
    assert len(digest(flat)) == 16
    assert len({digest(flat), digest(square), digest(flat._replace(dtype="int32"))}) == 3


def test_nothing_is_shown_of_what_has_no_element() -> None:
    (found,) = diff({KEY: ONE}, {KEY: value("fp32", [])})
    assert (found.kind, found.observed_first) == ("shape", "")


def test_the_ranks_of_what_nobody_expects() -> None:
    extra = Record(2, 3, "live", "param", "b", "fp32", (1,), (0,), (1,), ONE.data)
    found = diff({KEY: ONE}, {KEY: ONE, KEY._replace(fqn="b"): ONE}, records=[extra])
    assert [d.ranks for d in found] == [(3,)]


@pytest.mark.parametrize("counted", [value("fp32", 3.0), Value("utf8", (1,), b"X"), Value("utf8", (1,), b" ")])
def test_zeros_beside_a_count_are_no_lack_of_state(counted: Value) -> None:
    state, step = KEY._replace(role="exp_avg"), KEY._replace(role="step")
    zeros = {KEY: ONE, state: value("fp32", [0.0])}
    for expected, observed in (
        ({KEY: ONE, step: counted}, zeros), (zeros, {KEY: ONE, step: counted}), ({KEY: ONE}, {**zeros, step: counted})
    ):  # fmt: skip
        assert state in {d.key for d in diff(expected, observed, equivalences=[LAZY_STATE]) if d.fails}
