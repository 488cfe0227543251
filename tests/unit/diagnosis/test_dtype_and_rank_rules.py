"""Rules about dtypes, ranks, and what ranks keep beside training state, on values made by hand: what each says, whole,
and at which boundary it is silent. Each test is here because a change of the code went unnoticed without it
(`docs/mutation.md`)."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from shardproof.diagnosis import Context, Finding
from shardproof.diagnosis.rules import dtypes, ranks
from shardproof.diagnosis.rules import generators_and_fp8 as beside
from shardproof.diff import Difference, diff, numpy_dtype
from shardproof.observe.logical import Key, Logical, Problem, Value
from shardproof.observe.record import WRITTEN
from shardproof.scenario import Mesh, Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, live
from tests.unit.diagnosis.test_rule_engine import SCENARIO, context, fp32

W = live(1, "param", "w")


def held(dtype: str, *numbers: float, shape: tuple[int, ...] | None = None) -> Value:
    array = np.array(numbers).astype(numpy_dtype(dtype))
    return Value(dtype, shape or array.shape, array.tobytes())


def one(wanted: Value | Logical, got: Value | Logical, key: Key = W, scenario: Scenario = SCENARIO
        ) -> tuple[Difference, Context]:  # fmt: skip
    """The difference at a key where these values, or these and others, are wanted and observed."""
    expected, observed = (value if isinstance(value, dict) else {key: value} for value in (wanted, got))
    (difference,) = [d for d in diff(expected, observed) if d.key == key]
    return difference, context_of(expected, observed, scenario)


# --- dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "got", "values"),
    [
        (held("fp32", 1, 2), held("bf16", 1, 2), "with equal values"),
        (held("fp32", 1, 2 + 2**-20), held("bf16", 1, 2), "with the values rounded to it"),
        (held("bf16", 1, 2), held("fp32", 1, 2 + 2**-20), "with values that were not rounded to bf16"),
        (held("fp32", 1, 2), held("bf16", 1, 3), "with other values"),
        (held("fp32", 1, 2), held("bf16", 1, 2, shape=(2, 1)), "with other values"),
        (held("fp32", 1e30, 1), held("fp16", np.inf, 1), "with the values rounded to it"),
        (Value("utf8", (1,), b"a"), held("int64", 97), "with other values"),
        (held("int64", 97), Value("utf8", (1,), b"a"), "with other values"),
    ],
)
def test_another_dtype_is_told_with_what_became_of_the_values(wanted: Value, got: Value, values: str) -> None:
    difference, given = one(wanted, got)
    assert dtypes.other_dtype(replace(difference, kind="dtype"), given) == Finding(
        "certain",
        f"param of w is {got.dtype} instead of {wanted.dtype}, {values}, after operation 1 (step)",
        {"name": "w", "expected": wanted.dtype, "observed": got.dtype, "values": values},
    )
    assert dtypes.other_dtype(replace(difference, kind="bits"), given) is None
    assert dtypes.other_dtype(replace(difference, kind="dtype"), context({}, given.observed)) is None
    assert dtypes.other_dtype(replace(difference, kind="dtype"), context(given.expected, {})) is None


@pytest.mark.parametrize(("dtype", "through"), [("fp32", "bf16"), ("fp32", "fp16"), ("fp64", "fp32"), ("fp16", "bf16")])
def test_values_that_went_through_a_narrower_dtype(dtype: str, through: str) -> None:
    wanted = held(dtype, *(number + {"fp16": 2**-12, "bf16": 2**-9, "fp32": 2**-30}[through] for number in (1, 2, 3)))
    array = np.frombuffer(wanted.data, numpy_dtype(dtype))
    rounded = array.astype(numpy_dtype(through)).astype(numpy_dtype(dtype))
    difference, given = one(wanted, Value(dtype, wanted.shape, rounded.tobytes()))
    found = dtypes.narrowed(difference, given)
    elements = int((rounded != array).sum())
    strength = {1: "possible", 2: "likely"}.get(len({*rounded[rounded != array]}), "certain")
    assert found == Finding(
        strength,  # type: ignore[arg-type]
        f"param of w was rounded to {through} by operation 1 (step)",
        {"name": "w", "role": "param", "through": through, "elements": elements},
    )
    assert dtypes.partly_narrowed(difference, given) is None


def test_some_elements_that_went_through_a_narrower_dtype() -> None:
    wanted = held("fp32", 1 + 2**-12, 3 + 2**-12, 5 + 2**-12)
    difference, given = one(wanted, held("fp32", 1 + 2**-12, 3, 5))
    assert dtypes.narrowed(difference, given) is None
    found = dtypes.partly_narrowed(replace(difference, ranks=(1,)), given)
    assert found == Finding(
        "likely",
        "2 of 3 elements of param of w were rounded to fp16 by operation 1 (step)",
        {"name": "w", "role": "param", "through": "fp16", "ranks": [1]},
    )
    difference, given = one(wanted, held("fp32", 1 + 2**-12, 3, 5 + 2**-8))
    assert dtypes.partly_narrowed(difference, given) is None
    difference, given = one(held("int64", 1), held("int64", 2))
    assert dtypes.narrowed(difference, given) is dtypes.partly_narrowed(difference, given) is None
    difference, given = one(fp32(1), fp32(1, 2))
    assert dtypes.narrowed(difference, given) is dtypes.partly_narrowed(difference, given) is None


def test_numbers_too_large_for_a_narrower_dtype_are_no_error() -> None:
    wanted = held("fp32", 1e30, 1 + 2**-12, 2)
    difference, given = one(wanted, held("fp32", np.inf, 1, 2))
    found = dtypes.narrowed(difference, given)
    assert found is not None
    assert found.evidence["through"] == "fp16"
    difference, given = one(wanted, held("fp32", np.inf, 1 + 2**-12, 2))
    assert dtypes.partly_narrowed(difference, given) is not None


def test_nan_of_any_kind_is_no_error() -> None:
    """A bit that flips may make a signalling NaN, of which numpy warns where it casts it."""
    signalling = Value("fp32", (4,), np.array([0x7F800001, 0x3F800000, 0x40000000, 0x40400000], np.uint32).tobytes())
    difference, given = one(held("int64", 1, 2, 3, 4), signalling)
    told = dtypes.other_dtype(replace(difference, kind="dtype"), given)
    assert told is not None
    assert told.evidence["values"] == "with other values"
    narrow = np.array([0x7FC00000, 0x3F800000, 0x40000000, 0x40400000], np.uint32)
    difference, given = one(signalling, Value("fp32", (4,), narrow.tobytes()))
    assert dtypes.narrowed(difference, given) is not None
    spoilt = Value("fp32", (4,), signalling.data[:12] + bytes(4))
    difference, given = one(signalling, spoilt)
    assert dtypes.partly_narrowed(difference, given) is None


# --- ranks --------------------------------------------------------------------------------------------


def conflict(role: str = "param", op: int = 1) -> tuple[Difference, Context]:
    key = live(op, role, "w")
    problem = Problem(key, "replica_conflict", (0, 1), "ranks [0, 1] differ")
    expected = {key: fp32(1)}
    (difference,) = diff(expected, expected, [problem])
    return difference, context(expected, expected)


def test_copies_that_are_not_equal() -> None:
    difference, given = conflict()
    found = ranks.replicas_diverged(difference, given)
    assert found == Finding(
        "certain", "param of w after operation 1 (step), ranks [0, 1] differ", {"name": "w", "ranks": [0, 1]}
    )
    assert ranks.replicas_diverged(replace(difference, kind="gap"), given) is None
    assert ranks.norms_differ(difference, given) is None
    difference, given = conflict("norm")
    assert ranks.norms_differ(difference, given) == ranks.replicas_diverged(difference, given) is not None
    assert ranks.norms_differ(replace(difference, kind="norm"), given) is None


NORM = live(1, "norm", "total_norm")


@pytest.mark.parametrize(
    ("got", "gradient", "said"),
    [
        (2.0, (2, 4, 0), ("likely", ", as if elements were left out")),
        (8.0, (2, 4, 0), ("likely", ", as if elements were counted more than once")),
        (2.0, (1, 2 * (1 + 2**-21), 0), ("likely", ", as if elements were left out")),
        (2.0, (1, 2 * (1 + 2**-9), 0), ("possible", "")),  # summed in bf16
        (2.0, (-1, -2 * (1 + 2**-21), 0), ("likely", ", as if elements were left out")),
        (2.0, (1, 2, 1), ("possible", "")),
        (2.0, (1, -2, 0), ("possible", "")),
        (2.0, (1, 2), ("likely", ", as if elements were left out")),
        (2.0, None, ("likely", ", as if elements were left out")),
        (np.inf, (2, 4, 0), ("possible", "")),
    ],
)
def test_a_norm_of_a_part(got: float, gradient: tuple[float, ...] | None, said: tuple[str, str]) -> None:
    """Only where gradients are what they must be but for one factor is the norm a mistake of its own."""
    expected = {
        NORM: held("fp32", 4.0, shape=()),
        live(1, "grad", "w"): fp32(1, 2, 0),
        live(3, "grad", "w"): fp32(1, 2),
    }
    observed = {NORM: held("fp32", got, shape=()), live(3, "grad", "w"): fp32(5, 2)}
    if gradient is not None:
        observed[live(1, "grad", "w")] = fp32(*gradient)
    difference, given = one(expected, observed, NORM)
    difference = replace(difference, kind="norm")
    confidence, why = said
    assert ranks.norm_of_a_part(difference, given) == Finding(
        confidence,  # type: ignore[arg-type]
        f"total_norm is {got:g} instead of 4 after operation 1 (step){why}",
        {"name": "total_norm", "expected": 4.0, "observed": got},
    )
    assert ranks.norm_of_a_part(replace(difference, kind="bits"), given) is None
    assert ranks.norm_of_a_part(difference, replace(given, observed={})) is None
    assert ranks.norm_of_a_part(difference, replace(given, expected={})) is None


def test_gradients_that_are_all_zero_have_any_factor() -> None:
    assert ranks.clipped_alike(1, context({live(1, "grad", "w"): fp32(0, 0)}, {live(1, "grad", "w"): fp32(0, 0)}))
    several = {live(1, "grad", name): fp32(1, 2) for name in "ab"}
    assert ranks.clipped_alike(1, context(several, dict.fromkeys(several, fp32(3, 6))))
    assert not ranks.clipped_alike(1, context(several, several | {live(1, "grad", "b"): fp32(3, 6)}))
    assert ranks.clipped_alike(1, context(several, dict.fromkeys(several, fp32(0, 0)))), "a factor of 0"
    assert ranks.clipped_alike(1, context(several, dict.fromkeys(several, fp32(8, 16.00001)))), "alike within roundings"
    assert not ranks.clipped_alike(1, context(several, dict.fromkeys(several, fp32(8, 16.125))))
    halves = {live(1, "grad", name): held("bf16", 1, 2) for name in "ab"}
    assert ranks.clipped_alike(1, context(halves, dict.fromkeys(halves, held("bf16", 8, 16.125))))


@pytest.mark.parametrize("kind", ["gap", "overlap", "size", "bits"])
def test_shards_that_do_not_add_up(kind: str) -> None:
    problem = Problem(W, kind, (1,), "what is wrong")  # type: ignore[arg-type]
    (difference,) = diff({W: fp32(1)}, {W: fp32(1)}, [problem])
    found = ranks.bad_partition(difference, context())
    told = Finding(
        "certain", "param of w after operation 1 (step): what is wrong", {"name": "w", "kind": kind, "ranks": [1]}
    )
    assert found == (None if kind == "bits" else told)


TIED = Scenario(mesh=Mesh(1, 2, 1), model="tied", program="build step")


def tied_names() -> tuple[str, str]:
    alias = next(p for p in context_of({}, {}, TIED).model.params if p.spec.tied_to)
    return alias.spec.tied_to or "", alias.fqn


@pytest.mark.parametrize("role", ["param", "compute_param", "grad"])
def test_a_tie_that_came_apart(role: str) -> None:
    canonical, alias = tied_names()
    names = [p.fqn for p in context_of({}, {}, TIED).model.params]
    expected = {live(1, role, name): fp32(1) for name in names}
    for wrong, other in ((canonical, alias), (alias, canonical)):
        difference, given = one(expected, expected | {live(1, role, wrong): fp32(2)}, live(1, role, wrong), TIED)
        told = Finding(
            "certain",
            f"{role} of {wrong} and {other} differ after operation 1 (step)",
            {"name": wrong, "tied_to": other},
        )
        assert ranks.tie_split(difference, given) == (None if role == "grad" else told)
    both = expected | {live(1, role, canonical): fp32(2), live(1, role, alias): fp32(2)}
    difference, given = one(expected, both, live(1, role, alias), TIED)
    assert ranks.tie_split(difference, given) is None
    alone = next(name for name in names if name not in (canonical, alias))
    difference, given = one(expected, expected | {live(1, role, alone): fp32(2)}, live(1, role, alone), TIED)
    assert ranks.tie_split(difference, given) is None
    assert ranks.tie_split(replace(difference, key=live(1, "param", "nobody")), given) is None
    gone = {key: value for key, value in both.items() if key.fqn != canonical}
    assert ranks.tie_split(one(expected, both, live(1, role, alias), TIED)[0], replace(given, observed=gone)) is None


@pytest.mark.parametrize(
    ("which", "world", "told"),
    [
        ((0,), 4, "rank 0 of 4"),
        ((3,), 4, "rank 3, the last one of 4"),
        ((1, 3), 4, "ranks [1, 3] of 4"),
        ((1,), 2, "rank 1, the last one of 2"),
        ((0, 1, 2), 4, ""),
        ((), 4, ""),
    ],
)
def test_ranks_that_deviate(which: tuple[int, ...], world: int, told: str) -> None:
    difference, given = one(fp32(1, 2), fp32(1, 3), scenario=Scenario(mesh=Mesh(1, world, 1), program="build step"))
    difference = replace(difference, ranks=which)
    finding = Finding("possible", f"param of w deviates on {told}", {"name": "w", "ranks": list(which)})
    assert ranks.one_rank(difference, given) == (finding if told else None)
    for other in (
        replace(difference, kind="gap"),
        replace(difference, mismatched=difference.total),
        replace(difference, key=difference.key._replace(where=WRITTEN)),
        replace(difference, key=difference.key._replace(op=9)),
    ):
        assert ranks.one_rank(other, given) is None


# --- generators and weights in fp8 ---------------------------------------------------------------------


def states(*rows: bytes) -> Value:
    return Value("uint8", (len(rows), len(rows[0])) if len(rows) > 1 else (len(rows[0]),), b"".join(rows))


def test_a_stream_of_another_rank() -> None:
    keys = [live(1, "rng", f"rank{rank}.expert") for rank in range(3)]
    other = live(1, "rng", "rank0.tensor")
    expected = {keys[0]: states(b"aa"), keys[1]: states(b"bb"), keys[2]: states(b"cc"), other: states(b"dd")}
    difference, given = one(expected, expected | {keys[1]: states(b"aa")}, keys[1])
    assert beside.stream_of_another_rank(difference, given) == Finding(
        "certain",
        "rng of rank1.expert after operation 1 (step) is that of rank0",
        {"name": "rank1.expert", "from": ["rank0"]},
    )
    dotted = {key._replace(fqn=f"{key.fqn}.model"): state for key, state in expected.items()}
    key = keys[1]._replace(fqn="rank1.expert.model")
    assert beside.stream_of_another_rank(*one(dotted, dotted | {key: states(b"dd")}, key)) is None, "another stream"
    of_a_rank = beside.stream_of_another_rank(*one(dotted, dotted | {key: states(b"aa")}, key))
    assert of_a_rank is not None
    assert of_a_rank.evidence["from"] == ["rank0"]
    for wrong in (b"dd", b"zz"):
        difference, given = one(expected, expected | {keys[1]: states(wrong)}, keys[1])
        assert beside.stream_of_another_rank(difference, given) is None
    assert beside.stream_of_another_rank(*one(fp32(1), fp32(2))) is None
    assert beside.stream_of_another_rank(*one(states(b"aa"), states(b"aaa"), keys[0])) is None


def test_a_stream_of_another_place_in_one_value() -> None:
    key = live(1, "rng", "expert")
    right = states(b"aa", b"bb", b"cc")
    difference, given = one(right, states(b"bb", b"bb", b"bb"), key)
    assert beside.stream_of_another_rank(difference, given) == Finding(
        "certain",
        "rng of expert after operation 1 (step) is that of place 1",
        {"name": "expert", "from": ["place 1"] * 2},
    )
    difference, given = one(right, states(b"bb", b"aa", b"cc"), key)
    found = beside.stream_of_another_rank(difference, given)
    assert found is not None
    assert found.clause.endswith("is that of place 1, place 0")
    assert beside.stream_of_another_rank(*one(right, states(b"bb", b"zz", b"cc"), key)) is None
    assert beside.stream_of_another_rank(*one(states(b"aa", b"bb"), states(b"bb", b"bb"), key)) is not None


SCALE = live(1, "quant_scale", "w.quantised")


def inverse(*greatest: float) -> Value:
    return fp32(*(np.float32(1) / (np.float32(448) / np.float32(g)) for g in greatest))


@pytest.mark.parametrize("stepped", ["master", "param"])
@pytest.mark.parametrize("what", ["quantised", "param"])
def test_a_scale_of_a_part(stepped: str, what: str) -> None:
    key = SCALE._replace(fqn=f"w.{what}")
    weights = {live(1, stepped, "w"): fp32(1, -2, 3, 5)}
    if stepped == "master":
        weights[live(1, "param", "w")] = fp32(9, 9, 9, 9)
    due = {**weights, key: inverse(5, 5, 5, 5)}
    found = beside.scale_of_a_part(*one(due, due | {key: inverse(2, 2, 5, 5)}, key))
    assert found == Finding(
        "certain",
        f"quant_scale of w.{what} has 2 scales after operation 1 (step), each of the elements that have it",
        {"name": "w", "greatest": [2.0, 5.0]},
    )
    for wrong in (inverse(2, 2, 2, 2), inverse(2, 2, 4, 5), inverse(1, 1, 5, 5), inverse(2, 2, 5)):
        assert beside.scale_of_a_part(*one(due, due | {key: wrong}, key)) is None


def test_a_scale_of_a_part_is_told_of_scales_of_known_weights() -> None:
    due = {live(1, "param", "w"): fp32(1, 2), SCALE: inverse(2, 2)}
    wrong = due | {SCALE: inverse(1, 2)}
    assert beside.scale_of_a_part(*one(due, wrong, SCALE)) is not None
    assert beside.scale_of_a_part(*one({SCALE: due[SCALE]}, {SCALE: wrong[SCALE]}, SCALE)) is None
    assert beside.scale_of_a_part(*one(due | {live(1, "param", "w"): fp32(1, 2, 3)}, wrong, SCALE)) is None
    dotted = [{key._replace(fqn=f"up.{key.fqn}"): value for key, value in side.items()} for side in (due, wrong)]
    told = beside.scale_of_a_part(*one(*dotted, SCALE._replace(fqn="up.w.quantised")))
    assert told is not None
    assert told.evidence["name"] == "up.w"
    for key in (SCALE._replace(fqn="w.exp_avg"), SCALE._replace(role="other")):
        moved = [{key: value[SCALE], live(1, "param", "w"): fp32(1, 2)} for value in (due, wrong)]
        assert beside.scale_of_a_part(*one(moved[0], moved[1], key)) is None
    written = SCALE._replace(where=WRITTEN)
    assert beside.scale_of_a_part(*one(due | {written: due[SCALE]}, {written: wrong[SCALE]}, written)) is not None


def test_a_part_of_zeros_has_a_scale_of_one() -> None:
    due = {live(1, "param", "w"): fp32(0, 0, 4, np.inf), SCALE: fp32(1, 1, 1, 1)}
    wrong = due | {SCALE: fp32(1, 1, 4 / 448, 1)}
    found = beside.scale_of_a_part(*one(due, wrong, SCALE))
    assert found is not None
    assert found.evidence["greatest"] == [4.0, np.inf]


@pytest.mark.parametrize("through", ["bf16", "fp16", "fp32"])
def test_weights_that_were_quantised_again(through: str) -> None:
    quantised = live(1, "quantised", "w")
    read = np.array([1.0, 3.0, -416.0], np.float32)
    data = Value("fp8e4m3", (3,), read.astype(ml_dtypes.float8_e4m3fn).tobytes())
    factor = np.float32({"bf16": 1 + 2**-6, "fp16": 1 + 2**-9, "fp32": 1 + 2**-20}[through])
    due = {quantised: data, SCALE: Value("fp32", (3,), np.full(3, factor).tobytes())}
    stands = (read * factor).astype(numpy_dtype(through)).astype(np.float32)
    scale = np.float32(448) / np.abs(stands).max()
    again = np.clip(stands * scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    for key, made in ((quantised, Value("fp8e4m3", (3,), again.tobytes())),
                      (SCALE, Value("fp32", (3,), np.full(3, np.float32(1) / scale).tobytes()))):  # fmt: skip
        found = beside.quantised_twice(*one(due, due | {key: made}, key))
        assert found is not None
        assert (found.confidence, found.evidence["name"]) == ("certain", "w")
        if key is SCALE:
            assert found.evidence == {"name": "w", "through": through}
            made_of = f"is made of what the weight stands for in {through}"
            assert found.clause == f"quant_scale of w.quantised after operation 1 (step) {made_of}"
    spoilt = Value("fp8e4m3", (3,), again[::-1].tobytes())
    assert beside.quantised_twice(*one(due, due | {quantised: spoilt}, quantised)) is None
    for missing in due:
        left = {key: value for key, value in due.items() if key != missing}
        difference, given = one(due, due | {quantised: spoilt}, quantised)
        assert beside.quantised_twice(difference, replace(given, expected=left)) is None
    other = SCALE._replace(fqn="w.param")
    assert beside.quantised_twice(*one(due | {other: fp32(1, 1, 1)}, due | {other: fp32(2, 2, 2)}, other)) is None
    again_scaled = Value("fp32", (3,), np.full(3, np.float32(1) / scale).tobytes())
    assert beside.quantised_twice(*one(due | {other: fp32(1, 1, 1)}, due | {other: again_scaled}, other)) is None
    assert beside.quantised_twice(*one(due, {SCALE: due[SCALE]}, quantised)) is None, "it is missing"
    dotted = {key._replace(fqn=f"up.{key.fqn}"): value for key, value in due.items()}
    key = SCALE._replace(fqn="up.w.quantised")
    found = beside.quantised_twice(*one(dotted, dotted | {key: again_scaled}, key))
    assert found is not None
    assert found.evidence["name"] == "up.w"
    assert beside.quantised_twice(*one(fp32(1), fp32(2))) is None


def test_the_scale_of_zeros_is_one() -> None:
    assert [beside._scale(np.float32(amax)) for amax in (0, np.inf, 224)] == [1, 1, 2]
