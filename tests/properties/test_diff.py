"""The differ: equal means byte-equal, distances are numbers of representable values, and structure comes first."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.diff import (
    LAZY_STATE,
    NORM_ULPS,
    STRUCTURE,
    Difference,
    diff,
    digest,
    norm_bound,
    numpy_dtype,
    ulp_distance,
)
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Problem, Value
from shardproof.observe.record import ITEMSIZE, Record, whole

KEY = Key(2, "live", "param", "a.weight")
FLOATS = ("fp32", "fp64", "fp16", "bf16")


def value(dtype: str, numbers: object, shape: tuple[int, ...] | None = None) -> Value:
    array = np.asarray(numbers).astype(numpy_dtype(dtype))
    return Value(dtype, array.shape if shape is None else shape, array.tobytes())


def one(expected: Value, observed: Value, key: Key = KEY) -> Difference:
    (found,) = diff({key: expected}, {key: observed})
    assert found.key == key
    assert found.kind in (*STRUCTURE, "bits", "norm", "equivalent")
    return found


VALUES = st.builds(
    lambda dtype, n, data: Value(dtype, (n,), data[: n * ITEMSIZE[dtype]]),
    st.sampled_from(sorted(ITEMSIZE)),
    st.integers(1, 4),
    st.binary(min_size=32, max_size=32),
)
KEYS = st.builds(
    Key, st.integers(0, 2), st.sampled_from(["live", "written"]), st.sampled_from(["param", "grad"]), st.text("ab")
)
LOGICALS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=5)


@given(LOGICALS)
def test_nothing_differs_from_itself(logical: dict[Key, Value]) -> None:
    copy = {Key(*key): Value(v.dtype, v.shape, bytes(bytearray(v.data))) for key, v in logical.items()}
    assert diff(logical, copy) == []


@given(LOGICALS, LOGICALS)
def test_exactly_the_unequal_keys_are_reported(expected: dict[Key, Value], observed: dict[Key, Value]) -> None:
    found = diff(expected, observed)
    assert {d.key for d in found} == {
        k for k in expected.keys() | observed.keys() if expected.get(k) != observed.get(k)
    }
    for d in found:
        assert (d.kind == "missing") == (d.key not in observed)
        assert (d.kind == "extra") == (d.key not in expected)
        assert (d.expected_digest == d.observed_digest) is False
        assert d.fails


@given(st.sampled_from(sorted(ITEMSIZE)), st.binary(min_size=48, max_size=48), st.integers(0, 47), st.integers(0, 7))
def test_any_flipped_bit_is_found_where_it_is(dtype: str, data: bytes, byte: int, bit: int) -> None:
    shape = (2, 3, 48 // 6 // ITEMSIZE[dtype])
    flipped = bytearray(data)
    flipped[byte] ^= 1 << bit
    found = one(Value(dtype, shape, data), Value(dtype, shape, bytes(flipped)))
    at = tuple(int(i) for i in np.unravel_index(byte // ITEMSIZE[dtype], shape))
    text = dtype == "utf8"  # one value, however long it is
    assert (found.kind, found.mismatched) == ("bits", 1)
    assert (found.first_index, found.last_index) == (((), ()) if text else (at, at))
    assert found.total == (1 if text else 48 // ITEMSIZE[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
def test_ulp_distance_counts_representable_numbers(dtype: str, data: st.DataObject) -> None:
    start = data.draw(st.floats(-100, 100, width=16))
    steps = data.draw(st.integers(0, 300))
    numpy_type = numpy_dtype(dtype)
    number = np.array(start).astype(numpy_type)
    beyond = number
    for _ in range(steps):
        beyond = np.nextafter(beyond, np.array(np.inf).astype(numpy_type)).astype(numpy_type)
    if dtype == "bf16":
        beyond = beyond.astype(ml_dtypes.bfloat16)
    unsigned = f"u{numpy_type.itemsize}"
    a, b = (np.frombuffer(x.tobytes(), unsigned) for x in (number, beyond))
    # From one zero to the other is no step for nextafter, and 0 apart.
    assert ulp_distance(a, b).tolist() == ulp_distance(b, a).tolist() == [steps]


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_extremes(dtype: str) -> None:
    ends = value(dtype, [np.inf, -np.inf])
    found = one(ends, Value(dtype, (2,), value(dtype, [-np.inf, np.inf]).data))
    magnitude = int.from_bytes(value(dtype, np.inf).data, "little")
    assert found.max_ulp == 2 * magnitude


@pytest.mark.parametrize(
    ("dtype", "a", "b", "distance"),
    [
        ("int64", -(2**63), 2**63 - 1, 2**64 - 1),
        ("int64", 5, 3, 2),
        ("int32", -7, 7, 14),
        ("int16", -32768, 32767, 65535),
        ("uint8", 1, 255, 254),
    ],
)
def test_integers_differ_by_their_absolute_difference(dtype: str, a: int, b: int, distance: int) -> None:
    assert one(value(dtype, a), value(dtype, b)).max_ulp == distance


def test_bool_and_text_have_no_distance() -> None:
    found = one(Value("utf8", (3,), b"a.b"), Value("utf8", (3,), b"a.c"))
    assert (found.kind, found.max_ulp, found.expected_first, found.observed_first) == ("bits", None, "'a.b'", "'a.c'")
    assert one(value("bool", [True]), value("bool", [False])).max_ulp is None


def test_a_full_difference() -> None:
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    observed = expected.copy()
    observed[1, 1] = np.nextafter(np.float32(5), np.float32(9))
    observed[1, 2] = np.float32(6) + 5 * np.spacing(np.float32(6))
    observed[2, 3] = np.nan
    found = one(value("fp32", expected), value("fp32", observed))
    assert (found.mismatched, found.total, found.first_index, found.last_index) == (3, 12, (1, 1), (2, 3))
    assert (found.max_ulp, found.nan_mismatches) == (5, 1)
    assert found.ulp_histogram == (("1", 1), ("4-7", 1), ("nan", 1))
    assert found.expected_first == "5.0 (0x40a00000)"
    assert found.observed_first == "5.000000476837158 (0x40a00001)"
    assert found.expected_digest == digest(value("fp32", expected)) != found.observed_digest


def test_structure_before_bits_within_an_operation() -> None:
    ok, wrong = value("fp32", [1.0]), value("fp32", [2.0])
    keys = {name: Key(op, "live", "param", name) for op, name in ((0, "bits"), (0, "gone"), (0, "dtype"), (1, "shape"))}
    expected = dict.fromkeys(keys.values(), ok)
    observed = {keys["bits"]: wrong, keys["dtype"]: value("bf16", [1.0]), keys["shape"]: value("fp32", [[1.0]])}
    found = [(d.key.op, d.kind) for d in diff(expected, observed)]
    assert found == [(0, "dtype"), (0, "missing"), (0, "bits"), (1, "shape")]


def test_a_problem_of_assembly_replaces_missing() -> None:
    problem = Problem(KEY, "gap", (0, 1), "4 of 8 elements are on no rank, the first at [2, 0]")
    (found,) = diff({KEY: value("fp32", [1.0])}, {}, [problem])
    assert (found.kind, found.ranks, found.detail) == ("gap", (0, 1), problem.detail)


def test_ranks_that_hold_deviating_elements() -> None:
    full = np.arange(8, dtype=np.float32).reshape(4, 2)
    wrong = full.copy()
    wrong[2:] += 1
    records = [
        Record(2, r, "live", "param", "a.weight", "fp32", (4, 2), (r, 0), (1, 2), wrong[r : r + 1].tobytes())
        for r in range(4)
    ]
    observed, problems = assemble(records)
    (found,) = diff({KEY: value("fp32", full)}, observed, problems, records=records)
    assert found.ranks == (2, 3)
    (found,) = diff({KEY: value("bf16", full)}, observed, problems, records=records)
    assert (found.kind, found.ranks) == ("dtype", (0, 1, 2, 3))


STATE = {role: Key(2, "live", role, "a.weight") for role in ("exp_avg", "exp_avg_sq", "step")}
ZEROS = {
    STATE["exp_avg"]: value("fp32", [0.0, 0.0]),
    STATE["exp_avg_sq"]: value("fp32", [0.0, 0.0]),
    STATE["step"]: value("fp32", 0.0),
}
PARAM = {KEY: value("fp32", [1.0])}


def test_absent_lazy_state_is_equivalent_to_zeros_in_both_directions_only_if_promised() -> None:
    for expected, observed in (({**PARAM, **ZEROS}, PARAM), (PARAM, {**PARAM, **ZEROS})):
        found = diff(expected, observed, equivalences=[LAZY_STATE])
        assert {d.key for d in found} == set(ZEROS)
        assert {d.kind for d in found} == {"equivalent"}
        assert not any(d.fails for d in found)
        assert all(d.fails for d in diff(expected, observed))


@pytest.mark.parametrize(
    "change",
    [
        {STATE["step"]: value("fp32", 1.0)},
        {STATE["exp_avg"]: value("fp32", [0.0, -0.0])},
        {STATE["exp_avg"]: value("fp32", [0.0, 1.0])},
    ],
)
def test_state_that_is_not_zero_at_step_zero_is_not_equivalent_to_nothing(change: dict[Key, Value]) -> None:
    found = diff(PARAM, {**PARAM, **ZEROS, **change}, equivalences=[LAZY_STATE])
    assert next(iter(change)) in {d.key for d in found if d.fails}


def test_the_scale_of_a_moment_that_may_be_absent_may_be_absent_too() -> None:
    scale = Key(2, "live", "quant_scale", "a.weight.exp_avg")
    observed = {**PARAM, **ZEROS, scale: value("fp32", -0.0)}
    assert not any(d.fails for d in diff(PARAM, observed, equivalences=[LAZY_STATE]))
    assert any(d.fails for d in diff(PARAM, observed))
    stepped = {**observed, STATE["exp_avg"]: value("fp32", [0.0, 1.0])}
    found = diff(PARAM, stepped, equivalences=[LAZY_STATE])
    assert {STATE["exp_avg"], scale} <= {d.key for d in found if d.fails}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_scale_that_makes_a_zero_moment_no_zero_is_not_equivalent_to_nothing(number: float) -> None:
    scale = Key(2, "live", "quant_scale", "a.weight.exp_avg")
    observed = {**PARAM, **ZEROS, scale: value("fp32", number)}
    assert [d.key for d in diff(PARAM, observed, equivalences=[LAZY_STATE]) if d.fails] == [scale]


def test_a_lost_moment_is_not_excused_by_a_kept_step() -> None:
    expected = {**PARAM, **ZEROS}
    observed = {**PARAM, STATE["step"]: value("fp32", 3.0)}
    found = {d.key: d for d in diff(expected, observed, equivalences=[LAZY_STATE])}
    assert found[STATE["exp_avg"]].fails


def test_params_and_grads_are_never_excused() -> None:
    grad = Key(2, "live", "grad", "a.weight")
    (found,) = diff({**PARAM, grad: value("fp32", [0.0])}, PARAM, equivalences=[LAZY_STATE])
    assert (found.kind, found.fails) == ("missing", True)


def test_norm_is_compared_within_its_bound() -> None:
    norm = KEY._replace(role="norm", fqn="total_norm")
    exact = np.float32(3.0)
    for dtype, bound in NORM_ULPS.items():
        grad = {KEY._replace(role="grad"): value(dtype, [1.0])}
        near = (np.array([exact]).view(np.uint32) + bound).view(np.float32)
        far = (np.array([exact]).view(np.uint32) + bound + 1).view(np.float32)
        assert norm_bound(norm, grad) == bound
        assert diff({**grad, norm: value("fp32", [exact])}, {**grad, norm: value("fp32", near)}) == []
        (found,) = diff({**grad, norm: value("fp32", [exact])}, {**grad, norm: value("fp32", far)})
        assert (found.kind, found.max_ulp, found.fails) == ("norm", bound + 1, True)
    nan = value("fp32", [np.nan])
    assert one(value("fp32", [exact]), nan, norm).kind == "norm"


@pytest.mark.parametrize("dtype", sorted(NORM_ULPS))
def test_the_norm_bound_still_sees_a_missing_rank(dtype: str) -> None:
    """One of 8 ranks' equal shares missing changes the norm by a factor sqrt(7/8), beyond every bound."""
    full, part = (np.array([x], np.float32).view(np.uint32) for x in (1.99, 1.99 * (7 / 8) ** 0.5))
    assert int(ulp_distance(full, part)[0]) > NORM_ULPS[dtype]


@pytest.mark.parametrize("role", ["extra_state", "warning"])
def test_what_no_oracle_predicts_is_a_difference(role: str) -> None:
    key = Key(2, "live", role, "rank0.0")
    (found,) = diff({**PARAM, key: value("uint8", [1])}, PARAM)
    assert found.kind == "missing"
    (found,) = diff(PARAM, {**PARAM, key: value("uint8", [1])})
    assert found.kind == "extra"


def test_nan_with_signed_payload_is_shown_as_bits() -> None:
    quiet, loud = struct.pack("<I", 0x7FC00000), struct.pack("<I", 0xFFC00001)
    found = one(Value("fp32", (), quiet), Value("fp32", (), loud))
    assert (found.max_ulp, found.nan_mismatches, found.ulp_histogram) == (None, 1, (("nan", 1),))
    assert (found.expected_first, found.observed_first) == ("nan (0x7fc00000)", "nan (0xffc00001)")


def test_records_are_read_only_after_a_failure() -> None:
    record = whole(2, 0, "param", "a.weight", "fp32", (1,), PARAM[KEY].data)

    def records():  # type: ignore[no-untyped-def]
        yield record
        raise AssertionError("read although nothing differs")

    assert diff(PARAM, dict(PARAM), records=records()) == []
