"""Rules about wrong updates, on values made by hand: what each says, whole, and at which boundary it is silent.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shardproof.diagnosis import Finding
from shardproof.diagnosis.rules import updates
from shardproof.diff import diff
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import Record
from shardproof.scenario import Optimizer, Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, live
from tests.unit.diagnosis.test_dtype_and_rank_rules import held
from tests.unit.diagnosis.test_piece_rules import flat
from tests.unit.diagnosis.test_rule_engine import LATER, LOAD, SAVE, SCENARIO, STEP, fp32
from tests.unit.diagnosis.test_source_rules import at, found, met

W = live(LATER, "param", "w")
"""A weight after the second step, operation 3; before it is operation 2, a save."""
BEFORE = at(W, op=SAVE)
PLAIN = replace(SCENARIO, optimizer=Optimizer.parse("adamw/lr=0.5/weight_decay=0.25"))


# --- steps that did nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["param", "master", "exp_avg", "exp_avg_sq", "momentum", "grad"])
def test_a_step_that_did_not_reach_all(role: str) -> None:
    key = at(W, role=role)
    due = {key: fp32(1, 2, 3, 4), at(key, op=SAVE): fp32(1, 7, 8, 9)}
    told = found("certain", f"3 of 4 elements of {role} of w are as before operation 3 (step)", role=role, ranks=[])
    difference, given = met(due, {key: fp32(1, 7, 8, 9)}, key)
    assert updates.not_updated(difference, given) == (None if role == "grad" else told)
    if role != "grad":
        on_one = updates.not_updated(replace(difference, ranks=(1,)), given)
        assert on_one is not None
        assert on_one.clause.endswith("operation 3 (step) on ranks [1]")
        assert on_one.evidence["ranks"] == [1]


def test_what_a_step_changed_or_nothing_was_to_change() -> None:
    due = {W: fp32(1, 2, 3, 4), BEFORE: fp32(1, 7, 8, 9)}
    assert updates.not_updated(*met(due, {W: fp32(1, 7, 8, 5)}, W)) is None
    assert updates.not_updated(*met({W: due[W]}, {W: fp32(1, 7, 8, 9)}, W)) is None
    assert updates.not_updated(*met(due, {W: fp32(1)}, W)) is None
    few = updates.not_updated(*met({W: fp32(1, 2), BEFORE: fp32(1, 9)}, {W: fp32(1, 9)}, W))
    assert few is not None
    assert few.confidence == "likely"
    saved = {BEFORE: fp32(1, 2, 3), at(W, op=STEP): fp32(7, 8, 9)}
    assert updates.not_updated(*met(saved, {BEFORE: fp32(7, 8, 9)}, BEFORE)) is None, "no step"


def copies(*values: list[float], due: list[float] | None = None, before: Value | None = None) -> Finding | None:
    """What is said of a weight of which ranks hold these copies after a step."""
    held_by = [flat(W, rank, 0, np.array(value), (4,)) for rank, value in enumerate(values)]
    return of_records(held_by, fp32(*(due or [1, 2, 3, 4])), before or fp32(1, 7, 8, 9))


def of_records(records: list[Record], due: Value, before: Value) -> Finding | None:
    observed, problems = assemble(records)
    expected = {W: due, BEFORE: before}
    given = replace(context_of(expected, observed | {BEFORE: before}, SCENARIO), records=records)
    difference = next(d for d in diff(expected, observed | {BEFORE: before}, problems) if d.key == W)
    return updates.not_updated(replace(difference, kind="replica_conflict"), given)


def test_copies_that_a_step_did_not_reach() -> None:
    right, left = [1.0, 2, 3, 4], [1.0, 7, 8, 9]
    assert copies(right, left) == found(
        "certain", "param of w is as before operation 3 (step) on ranks [1], and not on others", role="param", ranks=[1]
    )
    several = copies(left, right, left)
    assert several is not None
    assert several.evidence["ranks"] == [0, 2]
    assert several.clause.endswith("on ranks [0, 2], and not on others")
    assert copies(right, [1, 7, 8, 5]) is None
    few = copies(right, [1, 2, 8, 9])
    assert few is not None
    assert few.confidence == "likely"
    three = copies(right, [1, 7, 8, 9])
    assert three is not None
    assert three.confidence == "certain"
    two_each = copies(right, [1, 2, 8, 9], [1, 2, 8, 9])
    assert two_each is not None
    assert two_each.confidence == "certain"
    assert copies(right, left, before=Value("int32", (4,), fp32(*left).data)) is None
    assert copies(right, left, before=Value("fp32", (2, 2), fp32(*left).data)) is None
    records = [flat(W, rank, 0, np.array(value), (4,)) for rank, value in enumerate((right, left))]
    assert of_records([records[0], records[1]._replace(dtype="int32")], fp32(*right), fp32(*left)) is None
    given = replace(context_of({W: fp32(*right), BEFORE: fp32(*left)}, {}, SCENARIO), records=())
    assert updates._copies_not_updated(W, fp32(*left), given) is None
    short = [records[0], records[1]._replace(data=records[1].data[:-4])]
    assert updates._copies_not_updated(W, fp32(*left), replace(given, records=short)) is None


@pytest.mark.parametrize(
    ("due", "got", "said"),
    [
        ((1, 2, 3), (1, np.inf, np.nan), True),
        ((1, 2, 3), (1, np.inf, 4), False),
        ((1, np.inf, 3), (1, 2, np.nan), False),
        ((1, 2, 3), (1, 4, 5), False),
    ],
)
def test_values_that_became_infinite(due: tuple[float, ...], got: tuple[float, ...], said: bool) -> None:
    told = found("likely", "2 of 3 elements of param of w are infinite or NaN after operation 3 (step)", role="param")
    assert updates.not_finite(*met({W: fp32(*due)}, {W: fp32(*got)}, W)) == (told if said else None)
    assert updates.not_finite(*met({BEFORE: fp32(*due)}, {BEFORE: fp32(*got)}, BEFORE)) is None
    assert updates.not_finite(*met({W: fp32(*due)}, {W: fp32(1)}, W)) is None
    assert updates.not_finite(*met({W: held("int64", 1)}, {W: held("int64", 2)}, W)) is None


# --- steps from another start -----------------------------------------------------------------------------

TINY = replace(SCENARIO, optimizer=Optimizer.parse("adamw/lr=0.0078125"))
FAR = updates.STEP_RADIUS * 2**-7


def moved(got: tuple[float, ...], start: tuple[float, ...], before: tuple[float, ...] = (1, 2, 3), role: str = "param",
          **more: Value) -> Finding | None:  # fmt: skip
    key = at(W, role=role)
    due = {key: fp32(1, 2, 3), at(key, op=SAVE): fp32(*before), at(key, op=STEP): fp32(*start)}
    return updates._moved_from(*met(due, {key: fp32(*got)}, key, TINY))


def test_a_weight_that_is_an_update_away_from_an_earlier_one() -> None:
    start = (5.0, 6.0, 7.0)
    near = tuple(number + FAR for number in start)
    assert moved(near, start) == found(
        "likely",
        "param of w after operation 3 (step) is one update away from its value of operation 1 (step), not from its "
        "value of operation 2 (save)",
        role="param", continued_from=STEP,
    )  # fmt: skip
    assert moved(near, start, role="master") is not None
    assert moved(near, start, role="exp_avg") is None
    assert moved(tuple(number + FAR * 1.01 for number in start), start) is None
    assert moved((1 + FAR, 2 + FAR, 3 + FAR), start) is None, "it is near to where it was"
    assert moved((1 + FAR, 2 + FAR, 3 + FAR), (1, 2, 3)) is None
    assert moved((1 + 2 * FAR,) * 3, (np.nan,) * 3) is None
    two = {W: fp32(1, 2, 3), BEFORE: fp32(1, 2, 3), at(W, op=STEP): fp32(5, 6, 7)}
    assert updates._moved_from(*met(two, {W: fp32(5, 6, 3)}, W, TINY)) is None, "two elements"
    assert updates._moved_from(*met(two, {W: fp32(5, 6)}, W, TINY)) is None
    assert (
        updates._moved_from(
            *met({BEFORE: fp32(1, 2, 3), at(W, op=0): fp32(5, 6, 7)}, {BEFORE: fp32(5, 6, 7)}, BEFORE, TINY)
        )
        is None
    )
    nothing = {W: fp32(1, 2, 3), at(W, op=STEP): fp32(5, 6, 7)}
    assert updates._moved_from(*met(nothing, {W: fp32(5, 6, 7)}, W, TINY)) is None, "nothing is known of before"


def test_the_nearest_start_counts() -> None:
    due = {W: fp32(1, 2, 3), BEFORE: fp32(1, 2, 3), at(W, op=STEP): fp32(5, 6, 7 + FAR / 2), at(W, op=0): fp32(5, 6, 7)}
    nearest = updates.continued_from(*met(due, {W: fp32(5, 6, 7)}, W, TINY))
    assert nearest is not None
    assert nearest.evidence["continued_from"] == 0


def right(got: Value, due: Value, before: Value, earlier: Value, role: str = "param", key: Key = W) -> Finding | None:
    key = at(key, role=role)
    values = {key: due, at(key, op=key.op - 1): before, at(key, op=0): earlier}
    undecayed = replace(SCENARIO, optimizer=Optimizer.parse("adamw/lr=0.5/weight_decay=0.0"))
    return updates._right_update_of_another(*met(values, {key: got}, key, undecayed))


def test_the_right_update_of_an_earlier_value() -> None:
    before, due, earlier = fp32(1, 2, 3), fp32(1.5, 2.5, 3.5), fp32(2, 4, 6)
    got = fp32(2.5, 4.5, 6.5)
    assert right(got, due, before, earlier) == found(
        "likely",
        "param of w after operation 3 (step) is the right update of its initialisation by operation 0 (build), not of "
        "its value of operation 2 (save)",
        role="param", continued_from=0,
    )  # fmt: skip
    assert right(got, due, before, earlier, "master") is not None
    assert right(got, due, before, earlier, "exp_avg") is None
    assert right(fp32(2.5, 4.5, 6.6), due, before, earlier) is None
    assert right(fp32(2.5, 4.5, 4.5), due, before, earlier) is None
    assert right(got, due, Value("fp32", (3, 1), before.data), earlier) is None
    assert right(got, due, before, Value("fp32", (3, 1), earlier.data)) is None
    assert right(fp32(1.5, 4.5, 6.5), due, before, earlier) is None, "two deviate"
    reshaped = {at(W, op=0): earlier, at(W, op=1): Value("fp32", (3, 1), due.data), BEFORE: before, W: due}
    undecayed = replace(SCENARIO, optimizer=Optimizer.parse("adamw/lr=0.5/weight_decay=0.0"))
    assert updates._right_update_of_another(*met(reshaped, {W: got}, W, undecayed)) is not None, "behind another shape"
    small = tuple(number + 2.0**-21 for number in (1, 2, 3))
    assert right(fp32(*(n + 2.0**-21 for n in (1.5, 2.5, 3.5))), due, before, fp32(*small)) is None, "within roundings"
    saved = at(W, op=SAVE)
    assert right(got, due, before, earlier, key=saved) is None, "no step"
    infinite = right(fp32(np.inf, 2.5, 4.5, 6.5), fp32(2, 1.5, 2.5, 3.5), fp32(1, 1, 2, 3), fp32(1, 2, 4, 6))
    assert infinite is not None
    unlike = [Value("fp32", (3, 1), value.data) for value in (before, earlier)]
    assert right(got, due, *unlike) is None
    held_infinity = right(fp32(7, 2.5, 4.5, 6.5), fp32(9, 1.5, 2.5, 3.5), fp32(np.inf, 1, 2, 3), fp32(1, 2, 4, 6))
    assert held_infinity is not None
    integers = [Value("int32", value.shape, value.data) for value in (got, due, before, earlier)]
    assert right(*integers) is None
    assert right(fp32(1), due, before, earlier) is None


@pytest.mark.parametrize(("dtype", "rounding"), [("fp16", 2.0**-11), ("bf16", 2.0**-8), ("fp32", 2.0**-20)])
def test_a_right_update_is_right_within_roundings(dtype: str, rounding: float) -> None:
    values = [held("fp32", *numbers) for numbers in ((1, 2, 3), (1, 2, 3), (65, 66, 67))]
    for off, close in ((0.9, True), (1.5, False)):
        got = [number * (1 + off * rounding) + off * rounding * own for number, own in ((65, 1), (66, 2), (67, 3))]
        sides = [Value(dtype, v.shape, _as(v, dtype)) for v in values]
        told = right(Value(dtype, (3,), _as(fp32(*got), dtype)), sides[0], sides[1], sides[2])
        if dtype == "fp32":
            assert (told is not None) is close
        assert told is None or told.confidence == "likely"


def _as(value: Value, dtype: str) -> bytes:
    return held(dtype, *np.frombuffer(value.data, np.float32).tolist()).data


# --- decays of another value ------------------------------------------------------------------------------

MOMENT = at(W, role="exp_avg")
DECAYING = replace(SCENARIO, optimizer=Optimizer.parse("adam/lr=0.5/weight_decay=0.25"))
BETA = 1 - DECAYING.optimizer.beta1


def decayed(got: tuple[float, ...], *, role: str = "param", key: Key = MOMENT, cold: Logical | None = None,
            earlier: Value | None = None, current: Value | None = None, more: Logical | None = None,
            due: tuple[float, ...] = (1, 2, 3)) -> Finding | None:  # fmt: skip
    weight = at(key, role=role, op=key.op - 1)
    expected = {key: fp32(*due), weight: current or fp32(10, 20, 30), at(weight, op=0): earlier or fp32(14, 28, 42)}
    expected |= {at(weight, op=key.op): fp32(0), **(more or {})}
    return updates._decayed_from(*met(expected, {key: fp32(*got)}, key, DECAYING, cold))


def test_a_moment_into_which_the_decay_of_earlier_weights_went() -> None:
    gone = np.array([4.0, 8, 12]) * 0.25 * BETA
    got = tuple(np.array([1.0, 2, 3]) + gone)
    told = "exp_avg of w after operation 3 (step) took in the weight decay that param would have with "
    assert decayed(got) == found(
        "likely", f"{told}its initialisation by operation 0 (build)", role="param", continued_from=0
    )
    of_master = decayed(got, role="master")
    assert of_master is not None
    assert of_master.evidence["role"] == "master"
    assert decayed(tuple(np.array(got) + 0.25)) is None
    assert decayed((1.0, 2.0, float(got[2]))) is None, "one element"
    assert decayed(got, earlier=Value("fp32", (3, 1), fp32(14, 28, 42).data)) is None
    assert decayed(got, current=Value("fp32", (3, 1), fp32(10, 20, 30).data)) is None
    assert decayed(got, key=at(MOMENT, role="exp_avg_sq")) is None
    assert decayed(got, key=at(MOMENT, op=SAVE)) is None, "no step"
    cold = {at(W, op=STEP): fp32(18, 36, 54)}
    without_load = decayed(tuple(np.array([1.0, 2, 3]) + 2 * gone), cold=cold)
    assert without_load is not None
    assert without_load.clause == f"{told}its value of operation 1 (step) in the run without a load"
    momentum = decayed(tuple(np.array([1.0, 2, 3]) + np.array([4.0, 8, 12]) * 0.25), key=at(MOMENT, role="momentum"))
    assert momentum is not None, "a momentum takes in all of the decay"
    once = {at(W, op=STEP): Value("fp32", (3, 1), fp32(1, 2, 3).data)}
    assert decayed(got, more=once) is not None, "one of another shape lies between"
    settings = {"weight_decay": 0.5, "beta1": 0.25}
    of_group = {live(SAVE, "hyperparameter", f"group0.{name}"): held("fp32", number, shape=())
                for name, number in settings.items()}  # fmt: skip
    by_group = tuple(np.array([1.0, 2, 3]) + np.array([4.0, 8, 12]) * 0.5 * 0.75)
    assert decayed(by_group, more=of_group) is not None
    assert decayed(got, more=of_group) is None
    infinite = (fp32(np.inf, 14, 28, 42), fp32(np.inf, 10, 20, 30))
    assert decayed((1, *got), due=(2, 1, 2, 3), earlier=infinite[0], current=infinite[1]) is None
    unknown = {MOMENT: fp32(1, 2, 3)}
    assert updates._decayed_from(*met(unknown, {MOMENT: fp32(*got)}, MOMENT, DECAYING)) is None


def test_a_moment_takes_in_a_decay_within_its_roundings() -> None:
    weights = {BEFORE: fp32(0, 0, 0), at(W, op=0): fp32(256, 512, 768)}
    gone = np.array([256.0, 512, 768]) * 0.25 * BETA
    half = {MOMENT: held("bf16", 1, 2, 3), **weights}
    for off, close in ((1.02, True), (1.05, False)):
        got = held("bf16", *(np.array([1.0, 2, 3]) + off * gone))
        told = updates._decayed_from(*met(half, {MOMENT: got}, MOMENT, DECAYING))
        assert (told is not None) is close
    large = {MOMENT: fp32(1024, 2048, 4096), **weights}
    for off, close in ((0.0, True), (1 / 64, False)):
        got = fp32(*(np.array([1024.0, 2048, 4096]) + gone + off))
        assert (updates._decayed_from(*met(large, {MOMENT: got}, MOMENT, DECAYING)) is not None) is close


def gone_on(got: tuple[float, ...], *, role: str = "exp_avg", cold: Logical | None = None, key: Key = MOMENT,
            earlier: Value | None = None, seen: Value | None = None, more: Logical | None = None
            ) -> Finding | None:  # fmt: skip
    key = at(key, role=role)
    before = at(key, op=key.op - 1)
    due = {key: fp32(10, 20, 30), before: fp32(1, 2, 3), at(key, op=0): earlier or fp32(5, 7, 9), **(more or {})}
    changed = {before: seen} if seen else {}
    return updates.moment_continued_from(*met(due, {key: fp32(*got), **changed}, key, SCENARIO, cold))


@pytest.mark.parametrize(("role", "beta"), [("exp_avg", 0), ("exp_avg_sq", 1), ("momentum", 2)])
def test_a_moment_that_went_on_from_an_earlier_one(role: str, beta: int) -> None:
    optimizer = SCENARIO.optimizer
    kept = (optimizer.beta1, optimizer.beta2, optimizer.momentum)[beta]
    got = tuple(np.array([10.0, 20, 30]) + kept * np.array([4.0, 5, 6]))
    told = found(
        "likely",
        f"{role} of w after operation 3 (step) goes on from its initialisation by operation 0 (build), not from its "
        "value of operation 2 (save)",
        continued_from=0,
    )
    assert gone_on(got, role=role) == told
    assert gone_on(tuple(np.array(got) * 1.01), role=role) is None
    assert gone_on(got, role=role, earlier=Value("fp32", (3, 1), fp32(5, 7, 9).data)) is None
    assert gone_on(got, role=role, seen=fp32(1, 2, 4)) is None, "it was wrong before"
    assert gone_on(got, role=role, key=at(MOMENT, op=SAVE)) is None, "no step"
    cold = {at(MOMENT, role=role, op=STEP): fp32(5, 7, 9)}
    once = {at(MOMENT, role=role, op=STEP): Value("fp32", (3, 1), fp32(5, 7, 9).data)}
    assert gone_on(got, role=role, more=once) == told, "one of another shape lies between"
    setting = live(SAVE, "hyperparameter", f"group0.{updates.MOMENTS[role]}")
    assert gone_on(got, role=role, more={setting: held("fp32", 0.25, shape=())}) is None
    by_group = tuple(np.array([10.0, 20, 30]) + 0.25 * np.array([4.0, 5, 6]))
    assert gone_on(by_group, role=role, more={setting: held("fp32", 0.25, shape=())}) == told
    without = gone_on(got, role=role, cold=cold, earlier=fp32(0, 0, 0))
    assert without is not None
    assert "goes on from its value of operation 1 (step) in the run without a load, not from its" in without.clause
    assert gone_on((got[0], 20, 30), role=role) is None, "one element"


def test_no_other_role_goes_on_from_an_earlier_value() -> None:
    assert gone_on((13.6, 24.5, 35.4), role="param") is None


def test_what_was_held_before() -> None:
    values = {at(W, op=op): fp32(op) for op in range(4)}
    given = replace(context_of(values, {}, SCENARIO), cold={at(W, op=op): fp32(9) for op in (0, 2, 3)})
    assert [(index, run) for index, _, run in updates._held_before(W, given)] == [
        (1, ""), (0, ""), (2, " in the run without a load"), (0, " in the run without a load"),
    ]  # fmt: skip


# --- weight decay ----------------------------------------------------------------------------------------


def times(factor: float, *, key: Key = W, dtype: str = "fp32", scenario: Scenario = PLAIN, more: Logical | None = None,
          base: tuple[float, ...] = (8, 16, 32), due: tuple[float, ...] = (7, 15, 31)) -> Finding | None:  # fmt: skip
    """What is said of a weight that went `factor` of its size lower than it must."""
    before = at(key, op=key.op - 1)
    expected = {key: held(dtype, *due), before: held(dtype, *base), **(more or {})}
    start = base if context_of({}, {}, scenario).op_kind(key.op) == "step" else due
    got = [number - factor * own for number, own in zip(due, start, strict=True)]
    return updates.weight_decay(*met(expected, {key: held(dtype, *got)}, key, scenario))


@pytest.mark.parametrize(("factor", "how", "count"), [(0.125, "once too often", 1), (-0.125, "once too little", -1)])
def test_a_weight_that_was_decayed_too_often_or_too_little(factor: float, how: str, count: int) -> None:
    told = found("likely", f"param of w was decayed {how} by operation 3 (step)", lr_times_decay=0.125, times=count)
    assert times(factor) == told
    assert times(factor, key=at(W, role="master")) is not None
    assert times(factor, key=at(W, role="exp_avg")) is None
    assert times(factor * 1.04) == told
    assert times(factor * 1.06) is None
    assert times(factor * 0.96) == told
    assert times(factor * 0.94) is None
    assert times(factor, base=(8, 0, 32)) is None
    assert times(factor, base=(8, 16), due=(7, 15)) is None, "two elements"
    for base, due, got in (((8, 0, 32), (7, 15, 31), (6, 14, 27)), ((np.inf, 16, 32), (np.inf, 15, 31), (5, 13, 27))):
        assert updates.weight_decay(*met({W: fp32(*due), BEFORE: fp32(*base)}, {W: fp32(*got)}, W, PLAIN)) is None
    load = times(factor, key=at(W, op=LOAD))
    assert load is not None, "a load may take a step"
    assert load.clause.endswith(f"{how} by operation 5 (load)")


@pytest.mark.parametrize(("dtype", "rounding"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_a_decay_is_told_where_it_is_more_than_a_rounding(dtype: str, rounding: float) -> None:
    base = due = (8.0, 16.0, 32.0)
    large = replace(SCENARIO, optimizer=Optimizer.parse(f"adamw/lr=1.0/weight_decay={2.5 * rounding}"))
    assert times(2.5 * rounding, dtype=dtype, scenario=large, base=base, due=due) is not None
    small = replace(SCENARIO, optimizer=Optimizer.parse(f"adamw/lr=1.0/weight_decay={2 * rounding}"))
    assert times(2 * rounding, dtype=dtype, scenario=small, base=base, due=due) is None


def test_a_decay_less_than_a_rounding_is_told_by_its_bits() -> None:
    scenario = replace(SCENARIO, optimizer=Optimizer.parse("adamw/lr=1.0/weight_decay=0.003"))
    key, due = at(W, op=LOAD), (1.0078125, 1.9921875, 3.984375, 7.96875)
    got = held("bf16", *(number * (1 - 0.003) for number in due))
    difference, given = met({key: held("bf16", *due)}, {key: got}, key, scenario)
    pair = given.pair(difference)
    assert pair is not None
    assert pair.at.tolist() == [1, 2, 3]
    assert [updates._is_decayed(pair, amount) for amount in (0.003, 0.0, 0.01, -0.003)] == [True, False, False, False]
    infinite = met({key: fp32(np.inf, 2, 3)}, {key: fp32(np.inf, 1, 1)}, key, scenario)
    pair = infinite[1].pair(infinite[0])
    assert pair is not None
    assert not updates._is_decayed(pair, 1.0)
    assert updates.weight_decay(difference, given) == found(
        "likely", "param of w was decayed once too often by operation 5 (load)", lr_times_decay=0.003, times=1
    )
    stepped = {W: held("bf16", *due), BEFORE: held("bf16", 64, 64, 64, 64)}
    assert updates.weight_decay(*met(stepped, {W: got}, W, scenario)) is None


def test_shares_that_a_step_may_take_off() -> None:
    given = context_of({}, {}, PLAIN)
    assert updates._decays(W, given) == [0.125]
    assert updates._decays(at(W, op=99), given) == [0.125]
    assert updates._decays(at(W, op=LOAD), given) == [0.125, 1.0 * 0.375], "and by what a later build begins with"
    lr, decay = live(LATER, "hyperparameter", "group0.lr"), live(LATER, "hyperparameter", "group0.weight_decay")
    groups = {lr: fp32(2), decay: fp32(0.25), at(lr, op=SAVE): fp32(4), at(decay, op=SAVE): fp32(0.5)}
    groups[live(LATER, "hyperparameter", "group1.lr")] = fp32(9)
    groups[at(lr, role="param")] = fp32(7)
    assert updates._decays(W, context_of(groups, {}, PLAIN)) == [0.125, 2.0, 0.5]
    assert list(updates._decays_of_groups(LATER, context_of(groups, {}, PLAIN))) == [0.5]
    flattened = {at(lr, fqn="a.b.lr"): fp32(3), at(lr, fqn="a.b.weight_decay"): fp32(0.5)}
    assert list(updates._decays_of_groups(LATER, context_of(flattened, {}, PLAIN))) == [1.5]


def test_groups_have_shares_of_their_own() -> None:
    scenario = replace(PLAIN, model="groups")
    given = context_of({}, {}, scenario)
    every = {p.fqn: given.model.groups[p.spec.group] for p in given.model.params}
    assert len(set(every.values())) > 1
    for fqn, group in every.items():
        own = 0.25 if group.weight_decay is None else group.weight_decay
        assert updates._decays(at(W, fqn=fqn), given)[0] == 0.5 * group.lr_scale * own
        assert updates._group(fqn, given) == group
    together = replace(scenario, optimizer=replace(scenario.optimizer, groups="one"))
    assert {updates._group(fqn, context_of({}, {}, together)) for fqn in every} == {updates.GroupSpec()}
    assert updates._group("nobody", given) == updates.GroupSpec()


# --- another kernel -------------------------------------------------------------------------------------


def ulps(count: int, *, key: Key = W, dtype: str = "fp32", **changes: object) -> Finding | None:
    due = held(dtype, 1.0, 2.0)
    pattern = {"fp32": np.uint32, "int32": np.uint32}[dtype]
    bits = np.frombuffer(due.data, pattern) + np.array([count, 0], pattern)
    difference, given = met({key: due}, {key: due._replace(data=bits.tobytes())}, key)
    return updates.other_kernel(replace(difference, **changes), given)  # type: ignore[arg-type]


def test_values_that_are_a_few_units_in_the_last_place_off() -> None:
    assert ulps(updates.KERNEL_ULPS) == found(
        "likely", "param of w is off by at most 8 ULP in 1 of 2 elements after operation 3 (step)", max_ulp=8
    )
    assert ulps(1) is not None
    assert ulps(updates.KERNEL_ULPS + 1) is None
    assert ulps(1, key=BEFORE) is None, "no step"
    assert ulps(1, dtype="int32") is None
    assert ulps(1, kind="norm") is None
    assert ulps(1, max_ulp=None) is None
    assert ulps(1, max_ulp=0) is None
    assert ulps(1, nan_mismatches=1) is None
    gradient = at(W, role="grad")
    for due, got, said in ((fp32(1), fp32(1), True), (fp32(1), fp32(2), False)):
        difference, given = met(
            {W: fp32(1), gradient: due}, {W: fp32(np.nextafter(np.float32(1), 2)), gradient: got}, W
        )
        assert (updates.other_kernel(difference, given) is not None) is said
