"""Rules about gradients, on values made by hand: what each says, whole, and at which boundary it is silent.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shardproof.diagnosis import Context, Finding
from shardproof.diagnosis.rules import gradients
from shardproof.diff import Difference, as_numbers, numpy_dtype
from shardproof.observe.logical import Key, Logical
from shardproof.observe.record import WRITTEN
from shardproof.scenario import Mesh, Optimizer, Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, live, predicted
from tests.unit.diagnosis.test_dtype_and_rank_rules import held, one
from tests.unit.diagnosis.test_rule_engine import SAVE, SCENARIO, STEP, fp32
from tests.unit.diagnosis.test_source_rules import at, found, met

W = live(STEP, "grad", "w")


# --- a factor -----------------------------------------------------------------------------------------

WIDE = Scenario(
    mesh=Mesh(2, 3, 5), program="build step", microbatches=3, optimizer=Optimizer.parse("sgd/loss_scale=1024.0")
)
FACTORS = {
    6: "the number of data-parallel ranks (6)", 1 / 3: "1 / dp_shard (1/3) or 1 / the number of microbatches (1/3)",
    2: "dp_replicate (2) or 2", 5: "tp (5)", 1 / 30: "1 / the world size (1/30)", 1024: "the loss scale (1024)",
    0.5: "1 / dp_replicate (1/2) or 1/2",
}  # fmt: skip


def times(factor: float, key: Key = W, due: tuple[float, ...] = (1, 2, 3), dtype: str = "fp32",
          scenario: Scenario = WIDE) -> Finding | None:  # fmt: skip
    got = np.array(due, numpy_dtype(dtype)).astype(np.float64) * factor
    return gradients.scaled(*met({key: held(dtype, *due)}, {key: held(dtype, *got)}, key, scenario))


@pytest.mark.parametrize(("factor", "known"), FACTORS.items())
def test_a_factor_that_is_known(factor: float, known: str) -> None:
    told = times(factor)
    assert told is not None
    assert told.clause == f"grad of w is {known} times what it must be after operation 1 (step)"
    assert (told.confidence, told.evidence["known_as"], told.evidence["role"]) == ("certain", known, "grad")
    assert told.evidence["factor"] == pytest.approx(factor)


def test_a_factor_that_is_not_known() -> None:
    assert times(1.25) == found(
        "likely",
        "grad of w is 1.25 times what it must be after operation 1 (step)",
        role="grad",
        factor=1.25,
        known_as="",
    )
    for role in ("exp_avg", "momentum", "norm", "quant_scale", "param", "exp_avg_sq"):
        assert (times(1.25, at(W, role=role)) is not None) is (role in gradients.LINEAR_ROLES)
    assert times(1 + gradients.ROUNDING * 2) is not None
    assert times(1 + gradients.ROUNDING / 2) is None
    assert times(1 - gradients.ROUNDING / 2) is None
    assert times(0.0) is None
    assert times(np.inf) is None
    assert times(-1.25) is not None
    assert times(1.25, due=(1,)) is None
    assert times(1.25, due=(1, 2)) is not None
    assert gradients.scaled(*met({W: fp32(0, 1, 2)}, {W: fp32(1, 1.25, 2.5)}, W)) is None
    assert gradients.scaled(*met({W: fp32(1, 2)}, {W: fp32(1)}, W)) is None
    assert gradients.scaled(*met({W: held("int64", 1, 2)}, {W: held("int64", 2, 4)}, W)) is None


def test_factors_lie_close_together_where_none_is_known() -> None:
    for off, close in ((2.0**-21, True), (2.0**-19, False)):
        got = fp32(1.25, 2.5, 5.0 * (1 + off))
        assert (gradients.scaled(*met({W: fp32(1, 2, 4)}, {W: got}, W)) is not None) is close
    known = gradients.scaled(*met({W: held("bf16", 1, 2, 4)}, {W: held("bf16", 2, 4, 8)}, W))
    assert known is not None
    far = gradients.scaled(*met({W: fp32(1, 2, 4)}, {W: fp32(2, 4, 8.5)}, W))
    assert far is None


def test_a_factor_is_one_of_numbers() -> None:
    for due in ((np.nan, 2, 4), (np.inf, 2, 4)):
        assert gradients.scaled(*met({W: fp32(*due)}, {W: fp32(1, 2.5, 5)}, W)) is None
    halved = gradients.scaled(*met({W: held("fp16", 60000, 40000)}, {W: held("fp16", 30000, 20000)}, W))
    assert halved is not None
    assert "1/2" in halved.clause, "though twice as much is more than fp16 has"


def test_factors_are_those_of_the_operation() -> None:
    given = context_of({}, {}, SCENARIO)
    assert list(gradients._known_factors(given, 99)) == []
    assert [name for name, _ in gradients._known_factors(given, 1)] == [
        "the number of data-parallel ranks (2)", "1 / the number of data-parallel ranks (1/2)", "dp_shard (2)",
        "1 / dp_shard (1/2)", "the world size (2)", "1 / the world size (1/2)", "2", "1/2",
    ]  # fmt: skip


# --- contributions: two microbatches of four ranks, each one bit of a number ------------------------------

EVERY = np.array([[[1.0], [2], [4], [8]], [[16], [32], [64], [128]]])


def told(hypotheses: object) -> dict[str, list[float]]:
    return {name: values[:, 0].tolist() for name, values in hypotheses}  # type: ignore[attr-defined]


def test_sums_that_leave_contributions_out() -> None:
    but = "the sum over all data-parallel ranks but"
    assert told(gradients._partial_sums(EVERY, Mesh(2, 2, 1))) == {
        "the average over all microbatches but 0": [240 / 4],
        "the average of microbatch 0 alone": [15 / 4],
        "the average over all microbatches but 1": [15 / 4],
        "the average of microbatch 1 alone": [240 / 4],
        f"{but} 0, divided by 4 or 3": [238 / 4, 238 / 3],
        f"{but} 1, divided by 4 or 3": [221 / 4, 221 / 3],
        f"{but} 2, divided by 4 or 3": [187 / 4, 187 / 3],
        f"{but} 3, divided by 4 or 3": [119 / 4, 119 / 3],
        "the average over one replica group alone": [51 / 2, 204 / 2, 51 / 4, 204 / 4],
        "the average over one shard index of all replicas alone": [85 / 2, 170 / 2, 85 / 4, 170 / 4],
        "one data-parallel rank's own contribution alone": [17, 34, 68, 136, 17 / 4, 34 / 4, 68 / 4, 136 / 4],
        "the average of all microbatches but the last plus one rank's own last one": [
            15 / 4 + last for last in (16, 32, 64, 128, 4, 8, 16, 32)
        ],
    }
    replicas_of_three = np.array([[[1.0], [2], [4], [8], [16], [32]]])
    of_six = told(gradients._partial_sums(replicas_of_three, Mesh(2, 3, 1)))
    assert of_six["the average over one replica group alone"] == [7 / 3, 56 / 3, 7 / 6, 56 / 6]
    assert of_six["the average over one shard index of all replicas alone"] == [9 / 2, 18 / 2, 36 / 2, 9 / 6, 3, 6]
    assert [name for name in of_six if "microbatch" in name] == []
    assert told(gradients._partial_sums(EVERY[:1, :1], Mesh(1, 1, 1))) == {}
    for mesh in (Mesh(1, 4, 1), Mesh(4, 1, 1)):
        assert not [name for name in told(gradients._partial_sums(EVERY, mesh)) if "replica" in name]
    of_two = told(gradients._partial_sums(EVERY[:1, :2], Mesh(1, 2, 1)))
    assert [of_two[f"{but} {rank}, divided by 2 or 1"] for rank in range(2)] == [[1, 2], [1 / 2, 1]]
    thrice = np.concatenate([EVERY, 256 * EVERY[:1]])
    late = told(gradients._partial_sums(thrice, Mesh(1, 4, 1)))
    assert late["the average of all microbatches but the last plus one rank's own last one"] == [
        255 / 4 + last for last in (256, 512, 1024, 2048, 64, 128, 256, 512)
    ]
    alone = told(gradients._partial_sums(EVERY[:, :1], Mesh(1, 1, 1)))
    assert [name for name in alone if "rank" in name] == []
    assert len(alone) == 4


def test_what_a_second_reduction_makes_of_an_average() -> None:
    mean = 255 / 4
    own = (17, 34, 68, 136)
    assert told(gradients._second_reductions(EVERY, Mesh(2, 2, 1))) == {
        "its average over the ranks, averaged once more with the other ranks' own gradients": [
            (mean + 255 - each) / 4 for each in own
        ],
        "its average over the ranks plus one rank's own gradient": [mean + each for each in own]
        + [mean + each / 4 for each in own],
        "divided by 2 again with every microbatch": [15 / 4 + 240 / 2, (15 / 4 + 240 / 2) * 2 / 4],
        "divided by 4 again with every microbatch": [15 / 16 + 240 / 4, (15 / 16 + 240 / 4) * 4 / 4],
        "doubled with every further microbatch": [
            *((2 * first + second) / 4 for first, second in ((1, 16), (2, 32), (4, 64), (8, 128))), 270 / 4,
        ],
    }  # fmt: skip
    assert told(gradients._second_reductions(np.ones((1, 4, 1)), Mesh(1, 4, 1))) == {}
    assert told(gradients._second_reductions(EVERY[:1, :1], Mesh(1, 1, 1))) == {}
    alone = told(gradients._second_reductions(EVERY[:, :1], Mesh(1, 1, 1)))
    assert alone == {"doubled with every further microbatch": [18, 18]}
    once = told(gradients._second_reductions(EVERY[:1], Mesh(1, 4, 1)))
    assert len(once) == 2


# --- sums in a narrower dtype: scalars, rounded one by one ------------------------------------------------


def rounds(dtype: str):  # type: ignore[no-untyped-def]
    return lambda number: float(np.float64(number).astype(numpy_dtype(dtype)).astype(np.float64))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_of_two_ranks_in_a_narrower_dtype(dtype: str) -> None:
    r, unit = rounds(dtype), {"bf16": 2.0**-8, "fp16": 2.0**-11}[dtype]
    a, b, c, d = 1 + unit, 3 * unit, unit / 2, 2 + unit
    every = np.array([[[a], [b]], [[c], [d]]])
    found_sums = told(gradients._narrow_sums(every, Mesh(1, 2, 1)))
    first, second = r(r(a) + c), r(r(b) + d)
    assert found_sums[f"accumulated over microbatches in {dtype}"] == [(first + second) / 2]
    assert found_sums[f"the average of contributions rounded to {dtype}"] == [(r(a) + r(b) + r(c) + r(d)) / 2]
    sums = {r(r(a + c) + b + d), r(r(b + d) + a + c)}
    assert {*found_sums[f"reduced in {dtype}"]} == {s / 2 for s in sums} | {r(s / 2) for s in sums}
    narrow = {r(first + second)}
    assert {*found_sums[f"accumulated and reduced in {dtype}"]} == {s / 2 for s in narrow} | {r(s / 2) for s in narrow}
    once = r(a + b + c + d)
    assert found_sums[f"an average whose sum was rounded to {dtype}"] == [once / 2, r(once / 2)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_with_every_microbatch(dtype: str) -> None:
    r, unit = rounds(dtype), {"bf16": 2.0**-8, "fp16": 2.0**-11}[dtype]
    every = np.array([[[1 + unit], [3 * unit]], [[unit / 2], [2 + unit]]])
    found_sums = told(gradients._narrow_sums(every, Mesh(1, 2, 1)))
    orders = [[r(r(x) + y), r(r(y) + x), r(x + y)] for (x,), (y,) in every]
    possible = {a / 2 + b / 2 for a in orders[0] for b in orders[1]} | {
        r(a) + r(b) for a in (sum(every[0, :, 0]) / 2,) for b in (sum(every[1, :, 0]) / 2,)
    }
    possible |= {r(a / 2) + r(b / 2) for a in orders[0] for b in orders[1]}
    for name in (
        f"reduced in {dtype} with every microbatch",
        f"reduced in {dtype} with every microbatch, and added in fp32",
    ):
        assert {*found_sums[name]} <= possible
        assert r(sum(every[0, :, 0]) / 2) + r(sum(every[1, :, 0]) / 2) in found_sums[name]
        assert r(sum(every[0, :, 0])) / 2 + r(sum(every[1, :, 0])) / 2 in found_sums[name]
    single = told(gradients._narrow_sums(every[:1], Mesh(1, 2, 1)))
    assert not [name for name in single if "every microbatch" in name]


def test_a_narrow_sum_of_three_ranks_is_divided_exactly_or_in_that_dtype() -> None:
    r = rounds("bf16")
    sums = told(gradients._narrow_sums(np.ones((1, 3, 1)) / 4, Mesh(1, 3, 1)))
    for name in ("reduced in bf16", "reduced in bf16 within replicas", "an average whose sum was rounded to bf16"):
        assert {*sums[name]} == {1 / 4}
    sums = told(gradients._narrow_sums(np.array([[[1.0], [2], [2]]]), Mesh(1, 3, 1)))
    for name in ("reduced in bf16", "reduced in bf16 within replicas", "an average whose sum was rounded to bf16"):
        assert {*sums[name]} == {5 / 3, r(5 / 3)}
    small = np.repeat([[[1.0], [2.0**-8], [2.0**-8]]], 2, axis=0)
    assert 2 * r(1 / 3) in told(gradients._narrow_sums(small, Mesh(1, 3, 1)))["reduced in bf16 with every microbatch"]


def test_a_ring_adds_from_any_rank_on_in_either_direction() -> None:
    r = rounds("bf16")
    a, b, c = 1.0, 2.0**-8, 3 * 2.0**-9
    orders = [(a, b, c), (b, c, a), (c, a, b), (c, b, a), (b, a, c), (a, c, b)]
    sums = gradients.reduced_in(np.array([[a], [b], [c]]), numpy_dtype("bf16"))[:, 0].tolist()
    assert sums == [r(r(r(x) + y) + z) for x, y, z in orders]
    by_three = gradients._averaged(np.array([[1.0]]), numpy_dtype("bf16"), Mesh(1, 3, 1))[:, 0].tolist()
    assert by_three == [1 / 3, r(1 / 3)]
    ranks = np.array([[a], [b], [c], [b]])
    replicas = gradients._reduced_in_replicas(ranks, numpy_dtype("bf16"), Mesh(2, 2, 1))[:, 0].tolist()
    exact = [r(a + b) + r(c + b), r(b + a) + r(b + c), r(b + a) + r(b + c), r(a + b) + r(c + b)]
    assert replicas == [*exact, *map(r, exact)]
    four = np.array([[a], [a], [b], [c]])
    assert r(r(r(a + c) + b) + a) == 2.015625
    assert {*gradients.reduced_in(four, numpy_dtype("bf16"))[:, 0]} == {2.0, 2.015625}, "the latter backwards alone"
    three = gradients._reduced_in_replicas(
        np.array([[x] for x in (a, b, c, b, b, b)]), numpy_dtype("bf16"), Mesh(2, 3, 1)
    )
    assert three.shape == (12, 1)


def test_numbers_too_large_for_a_narrower_dtype_are_no_error() -> None:
    sums = told(gradients._narrow_sums(np.array([[[1e30], [1e30]]]), Mesh(1, 2, 1)))
    assert "accumulated over microbatches in fp16" not in sums, "there is one microbatch"
    assert sums["the average of contributions rounded to fp16"] == [np.inf]


# --- clipping -------------------------------------------------------------------------------------------


def test_a_gradient_but_for_one_factor() -> None:
    due = np.array([[1.0, 2.0, 0.0]])
    assert gradients.times_a_factor(due, np.array([3.0, 6.0, 0.0]), 0.01)
    assert gradients.times_a_factor(due, np.array([3.0, 6.05, 0.0]), 0.01)
    assert not gradients.times_a_factor(due, np.array([3.0, 6.1, 0.0]), 0.01)
    assert not gradients.times_a_factor(due, np.array([3.0, 6.0, 1.0]), 0.01)
    assert not gradients.times_a_factor(due, np.array([-3.0, -6.0, 0.0]), 0.01)
    assert not gradients.times_a_factor(np.zeros((1, 3)), np.zeros(3), 0.01)
    assert not gradients.times_a_factor(due, np.zeros(3), 0.01)
    assert gradients.times_a_factor(np.array([[0.0, 0, 0], [5, 5, 5], [1, 2, 0]]), np.array([3.0, 6.0, 0.0]), 0.01)
    alternatives = np.array([[1.0, 2.0], [5.0, 6.0]])
    assert gradients._each_times(2.0, alternatives, np.array([2.0, 12.0]), 0.01)
    assert gradients._each_times(2.0, alternatives, np.array([2.0, 12.1]), 0.01)
    assert not gradients._each_times(2.0, alternatives, np.array([2.0, 12.3]), 0.01)
    assert not gradients._each_times(2.0, alternatives, np.array([2.0, 8.0]), 0.01)
    assert gradients._each_times(2.0, -alternatives, np.array([-2.0, -12.1]), 0.01)
    assert gradients._each_times(2.0, 0 * alternatives, np.array([0.0, 0.0]), 0.01)


def test_factors_by_which_a_gradient_may_have_been_clipped() -> None:
    norm = live(STEP, "norm", "total_norm")
    due = {W: fp32(0.5, 1, 0), norm: held("fp32", 6.0, shape=())}
    right = np.array([1.0, 2, 0])
    for got, factors in ((3.0, [0.5, 1.0]), (0.0, [0.5]), (np.inf, [0.5])):
        given = context_of(due, {norm: held("fp32", got, shape=())}, SCENARIO)
        assert gradients._clipping_factors(W, right, given) == factors
    assert gradients._clipping_factors(W, right, context_of(due, {}, SCENARIO)) == [0.5]
    assert gradients._clipping_factors(W, np.zeros(3), context_of(due, {}, SCENARIO)) == []


# --- gradients that were not there ----------------------------------------------------------------------


def no_gradient(due: Logical, got: Logical, key: Key = W, scenario: Scenario = SCENARIO) -> Finding | None:
    return gradients.no_gradient(*one(due, got, key, scenario))


def test_a_parameter_without_a_gradient() -> None:
    param = at(W, role="param")
    before = at(param, op=0)
    other = {at(W, fqn="v"): fp32(1)}
    due = {W: fp32(1), **other}
    stays = {param: fp32(3), before: fp32(3)}
    assert no_gradient(due, other | stays) == found(
        "certain", "grad of w was not there in operation 1 (step), and the parameter is as before it", unmoved=True
    )
    moved = found("likely", "grad of w was not there in operation 1 (step)", unmoved=False)
    assert no_gradient(due, other | {param: fp32(3), before: fp32(4)}) == moved
    assert no_gradient(due, other) == moved
    assert no_gradient(due, other | {before: fp32(3)}) == moved
    assert no_gradient(due, stays) is None, "nobody's gradient was seen"
    moment = at(W, role="exp_avg")
    stateless = no_gradient(due | {moment: fp32(1)}, stays)
    assert stateless is not None
    assert stateless.confidence == "certain"
    assert no_gradient(due | {moment: fp32(1)}, stays | {moment: fp32(1)}) is None
    assert no_gradient(due | {moment: fp32(1)}, {param: fp32(3), before: fp32(4)}) is None
    for role in ("exp_avg", "exp_avg_sq", "momentum"):
        assert gradients._stateless(W, context_of({at(W, role=role): fp32(1)}, {}, SCENARIO))
    assert not gradients._stateless(W, context_of({}, {}, SCENARIO))
    saved = at(W, op=SAVE)
    assert no_gradient({saved: fp32(1)}, {at(saved, fqn="v"): fp32(1)}, saved) is None, "no step"
    assert no_gradient({param: fp32(1)}, other, param) is None
    assert gradients.no_gradient(*met(due, {W: fp32(2)}, W)) is None


# --- steps that were skipped ------------------------------------------------------------------------------

OVERFLOWS = Scenario(mesh=Mesh(1, 2, 1), program="build step overflow step save step")
SCALE = live(3, "scaler", "scale")


def halved(got: float, key: Key = SCALE, before: float | None = 8.0, scenario: Scenario = OVERFLOWS) -> Finding | None:
    past = at(key, op=key.op - 1)
    seen = {} if before is None else {past: held("fp32", before, shape=())}
    due = {key: held("fp32", 8.0, shape=()), past: held("fp32", 8.0, shape=())}
    return gradients.skipped_again(*one(due, seen | {key: held("fp32", got, shape=())}, key, scenario))


def test_a_step_that_is_skipped_after_an_overflow() -> None:
    assert halved(4.0) == Finding(
        "certain", "operation 3 (step) halved the loss scale to 4, as the overflow before it did",
        {"name": "scale", "expected": 8.0, "observed": 4.0},
    )  # fmt: skip
    assert halved(3.0) is None
    assert halved(4.0, before=None) is None
    assert halved(4.0, before=16.0) is None
    assert halved(4.0, at(SCALE, op=5)) is None, "a step lies between"
    assert halved(4.0, at(SCALE, op=4)) is None, "no step"
    assert halved(4.0, at(SCALE, op=2)) is None, "the overflow itself"
    assert halved(4.0, at(SCALE, op=1)) is None
    for changes in ({"role": "step"}, {"fqn": "growth_tracker"}, {"where": WRITTEN}):
        assert halved(4.0, at(SCALE, **changes)) is None
    later = Scenario(mesh=Mesh(1, 2, 1), program="build overflow step")
    assert halved(4.0, live(2, "scaler", "scale"), scenario=later) is not None
    again = Scenario(mesh=Mesh(1, 2, 1), program="build overflow step step")
    assert halved(4.0, live(2, "scaler", "scale"), scenario=again) is not None, "whatever comes next"
    other = {SCALE: held("fp32", 8, shape=()), at(SCALE, op=2): held("fp32", 8, shape=())}
    assert gradients.skipped_again(*met(other, {SCALE: fp32(4, 4)}, SCALE, OVERFLOWS)) is None
    first = live(0, "scaler", "scale")
    assert gradients.skipped_again(*met({first: fp32(8)}, {first: fp32(4)}, first, OVERFLOWS)) is None


@pytest.mark.parametrize("role", ["param", "master", "exp_avg", "exp_avg_sq", "momentum", "step", "grad"])
def test_an_overflow_that_was_not_skipped(role: str) -> None:
    key = live(2, role, "w")
    for got, how in ((fp32(1, np.inf), "became infinite or NaN"), (fp32(1, 3), "was changed")):
        difference, given = met({key: fp32(1, 2)}, {key: got}, key, OVERFLOWS)
        told_of = found("certain", f"{role} of w {how} by operation 2 (overflow)", role=role, ranks=[])
        assert gradients.overflow_not_skipped(difference, given) == (None if role == "grad" else told_of)
    ranks = gradients.overflow_not_skipped(replace(difference, ranks=(1,)), given)
    assert (ranks is None) is (role == "grad")
    assert ranks is None or ranks.clause.endswith("by operation 2 (overflow) on ranks [1]")


def test_state_that_an_overflow_made_or_lost() -> None:
    key = live(2, "exp_avg", "w")
    for kind, said in (("extra", True), ("missing", True), ("replica_conflict", True), ("gap", False)):
        difference, given = one({key: fp32(1)}, {}, key, OVERFLOWS)
        found_of = gradients.overflow_not_skipped(replace(difference, kind=kind), given)  # type: ignore[arg-type]
        assert (found_of is not None) is said
    step = live(3, "exp_avg", "w")
    assert gradients.overflow_not_skipped(*met({step: fp32(1)}, {step: fp32(2)}, step, OVERFLOWS)) is None
    count = live(2, "step", "w")
    integers = gradients.overflow_not_skipped(
        *met({count: held("int64", 1)}, {count: held("int64", 2)}, count, OVERFLOWS)
    )
    assert integers is not None
    assert "was changed" in integers.clause


# --- gradients of a real scenario --------------------------------------------------------------------------

UP = "up.weight"
DENSE = Scenario(mesh=Mesh(1, 2, 1), microbatches=2)
CLIPS = replace(DENSE, optimizer=Optimizer.parse("adamw/clip=1.0"))


def gradient(scenario: Scenario, op: int = STEP) -> np.ndarray:
    return as_numbers(predicted(scenario)[live(op, "grad", UP)]).astype(np.float64).reshape(-1)


def wrong(scenario: Scenario, got: np.ndarray, op: int = STEP, role: str = "grad") -> tuple[Difference, Context]:
    key = live(op, role, UP)
    due = predicted(scenario)
    shape = due[key].shape
    return met(dict(due), {key: held(due[key].dtype, *got.reshape(-1), shape=shape)}, key, scenario)


def test_contributions_are_those_of_the_probe() -> None:
    given = context_of({}, {}, DENSE)
    every = gradients._contributions(UP, given.ops[STEP], given)
    assert every.shape == (2, 2, 112)
    assert (every.sum(axis=(0, 1)) / 2 == gradient(DENSE)).all()
    assert (gradients._average(UP, given.ops[STEP], given) == gradient(DENSE)).all()


def test_contributions_to_an_expert_are_of_as_many_ranks_as_have_it() -> None:
    scenario = Scenario(model="moe", mesh=Mesh(1, 4, 1), expert_parallel=2)
    given = context_of({}, {}, scenario)
    due = {key.fqn: value for key, value in predicted(scenario).items() if (key.op, key.role) == (STEP, "grad")}
    experts = {p.fqn for p in given.model.params if p.spec.ep_dim is not None}
    assert experts < {*due}
    for fqn, value in due.items():
        every = gradients._contributions(fqn, given.ops[STEP], given)
        assert every.shape[:2] == (1, 4)
        assert (every.sum(axis=(0, 1)) / 4 == as_numbers(value).reshape(-1)).all()
        pairs = every[:, ::2], every[:, 1::2]
        assert (pairs[0] == pairs[1]).all() == (fqn in experts)


def test_sums_in_bf16_are_off_by_no_more_than_roundings_or_by_anything_where_they_overflow() -> None:
    scenario = replace(DENSE, microbatches=3)
    given = context_of({}, {}, scenario)
    every = gradients._contributions(UP, given.ops[STEP], given)
    allowed = np.abs(every).sum(axis=(0, 1)) / 2 * (3 * 2 + 2) * 2.0**-7  # of six contributions, and the average of two
    right = gradient(scenario)
    for factor in (0.99, 1.01):
        for sign in (1, -1):
            difference, context = wrong(scenario, right + sign * factor * allowed)
            assert gradients._is_roughly_right(difference, context) is (factor < 1)
    one_only = right.copy()
    one_only[5] += 1.01 * allowed[5]
    assert not gradients._is_roughly_right(*wrong(scenario, one_only))
    infinite = right + 2 * allowed
    infinite[0] = np.inf
    assert gradients._is_roughly_right(*wrong(scenario, infinite))


def test_a_gradient_that_lacks_a_microbatch() -> None:
    given = context_of({}, {}, DENSE)
    every = gradients._contributions(UP, given.ops[STEP], given)
    half = every[1].sum(axis=0) / 2
    told_of = gradients.missing_contribution(*wrong(DENSE, half))
    assert told_of == Finding(
        "certain", "grad of up.weight is the average over all microbatches but 0, after operation 1 (step)",
        {"name": UP, "is": "the average over all microbatches but 0"},
    )  # fmt: skip
    spoilt = half.copy()
    spoilt[5] += 1
    assert gradients.missing_contribution(*wrong(DENSE, spoilt)) is None
    assert gradients.missing_contribution(*wrong(DENSE, half, role="exp_avg")) is None
    difference, given = wrong(DENSE, half)
    assert gradients.missing_contribution(replace(difference, key=at(difference.key, op=99)), given) is None
    mixed = np.where(np.arange(112) < 56, every[:, 0].sum(axis=0), every[:, 1].sum(axis=0))
    own = gradients.missing_contribution(*wrong(DENSE, mixed))
    assert own is not None
    assert own.evidence["is"] == "one data-parallel rank's own contribution alone"


def test_a_gradient_that_lacks_a_microbatch_and_was_clipped() -> None:
    given = context_of({}, {}, CLIPS)
    every = gradients._contributions(UP, given.ops[STEP], given)
    half = every[1].sum(axis=0) / 2
    told_of = gradients.missing_contribution(*wrong(CLIPS, half * 0.375))
    assert told_of == Finding(
        "likely",
        "grad of up.weight is the average over all microbatches but 0, and was clipped, after operation 1 (step)",
        {"name": UP, "is": "the average over all microbatches but 0"},
    )
    assert gradients.missing_contribution(*wrong(CLIPS, gradient(CLIPS) * 0.375)) is None, "only the norm was wrong"
    few = np.zeros(112)
    few[:3] = half[:3]
    assert gradients.missing_contribution(*wrong(CLIPS, few)) is None
    for dtype, each in (("fp32", True), ("bf16", False)):
        scenario = replace(CLIPS, dtype=replace(CLIPS.dtype, storage=dtype))
        context = context_of({}, {}, scenario)
        contributions = gradients._contributions(UP, context.ops[STEP], context)
        right = contributions.sum(axis=(0, 1)) / 2
        factor = float(np.median(gradient(scenario)[right != 0] / right[right != 0]))
        own = contributions.sum(axis=0)
        mixed = np.where(np.arange(112) < 56, own[0], own[1]) * factor
        of_owner = gradients.missing_contribution(*wrong(scenario, mixed))
        assert (of_owner is not None) is each


def test_gradients_that_were_kept() -> None:
    scenario = Scenario(mesh=Mesh(1, 2, 1), program="build step step step")
    sums = gradient(scenario, 3) + gradient(scenario, 2)
    told_of = gradients.gradient_kept(*wrong(scenario, sums, 3))
    assert told_of == Finding(
        "certain", "grad of up.weight after operation 3 (step) contains the gradients since operation 2 (step)",
        {"name": UP, "since_op": 2},
    )  # fmt: skip
    all_three = gradients.gradient_kept(*wrong(scenario, sums + gradient(scenario, 1), 3))
    assert all_three is not None
    assert all_three.evidence["since_op"] == 1
    spoilt = sums.copy()
    spoilt[7] += 1
    assert gradients.gradient_kept(*wrong(scenario, spoilt, 3)) is None
    assert gradients.gradient_kept(*wrong(scenario, sums, 3, "exp_avg")) is None
    assert gradients.gradient_kept(*wrong(scenario, sums / 4, 3)) is None, "nothing clipped it"


def test_gradients_that_were_kept_and_clipped() -> None:
    scenario = Scenario(mesh=Mesh(1, 2, 1), program="build step step step", optimizer=Optimizer.parse("adamw/clip=1.0"))
    context = context_of({}, {}, scenario)
    averages = {op: gradients._average(UP, context.ops[op], context) for op in (1, 2, 3)}
    told_of = gradients.gradient_kept(*wrong(scenario, (averages[3] + averages[2]) * 0.25, 3))
    assert told_of == Finding(
        "likely",
        "grad of up.weight after operation 3 (step) contains the gradients since operation 2 (step), and was clipped",
        {"name": UP, "since_op": 2},
    )
    all_three = gradients.gradient_kept(*wrong(scenario, sum(averages.values()) * 0.25, 3))
    assert all_three is not None
    assert all_three.evidence["since_op"] == 1
    assert gradients.gradient_kept(*wrong(scenario, averages[3] * 0.25, 3)) is None, "only the norm was wrong"
    saved = replace(scenario, program="build step step step save")
    key = live(4, "grad", UP)
    due = {key: predicted(saved)[live(3, "grad", UP)]}
    got = held("fp32", *(averages[3] + averages[2]) * 0.25, shape=due[key].shape)
    assert gradients.gradient_kept(*met(due, {key: got}, key, saved)) is None, "no step"
    spoilt = (averages[3] + averages[2]) * 0.25
    spoilt[7] += 1
    assert gradients.gradient_kept(*wrong(scenario, spoilt, 3)) is None
    assert gradients.gradient_kept(*wrong(scenario, np.repeat([1.0, 2.0], 56), 3)) is None
