"""Rules about counters, groups and what is absent, on values made by hand: what each says, whole, and at which boundary
it is silent. Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shardproof.diagnosis import Context, Finding
from shardproof.diagnosis.rules import counters, presence
from shardproof.diff import NOTHING, Difference
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.scenario import Mesh, Optimizer, Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, live
from tests.unit.diagnosis.test_dtype_and_rank_rules import held, one
from tests.unit.diagnosis.test_rule_engine import BUILD, LAST, LATER, LOAD, SAVE, SCENARIO, STEP, context, fp32

# --- counters -----------------------------------------------------------------------------------------


def count(role: str, wanted: float, got: float, fqn: str = "w", dtype: str = "fp32", op: int = STEP) -> Finding | None:
    key = live(op, role, fqn)
    return counters.counter_off(*one(held(dtype, wanted, shape=()), held(dtype, got, shape=()), key))


@pytest.mark.parametrize(
    ("wanted", "got", "how"),
    [(2, 3, "is 1 ahead"), (5, 2, "is 3 behind"), (5, 0, "is back at 0"), (0, 1, "is 1 ahead"), (5, -1, "is 6 behind")],
)
@pytest.mark.parametrize("role", ["step", "scheduler", "scaler"])
def test_a_counter_that_is_off(role: str, wanted: float, got: float, how: str) -> None:
    clause = f"{role} of w {how} after operation 1 (step): {got:g} instead of {wanted:g}"
    told = Finding("certain", clause, {"name": "w", "expected": wanted, "observed": got})
    assert count(role, wanted, got) == told
    assert count(role, wanted, got, dtype="int64") == told


def test_what_is_no_counter() -> None:
    for got in (2.5, np.inf, -np.inf, np.nan):
        assert count("step", 2, got) is None
    assert count("param", 2, 3) is None
    assert count("scaler", 2, 3, "scale") is None
    assert count("scheduler", 2, 3, "last_lr.0") is None
    assert count("buffer", 2, 3) is None
    assert counters.counter_off(*one(fp32(1, 2, 3), fp32(1, 2, 4), live(STEP, "step", "w"))) is None
    assert counters.counter_off(*one(fp32(1, 2), fp32(1, 3), live(STEP, "step", "w"))) is not None
    assert counters.counter_off(*one(fp32(1), fp32(1, 2), live(STEP, "step", "w"))) is None


def buffer(now: float, due: float, before: float, op: int = LATER, where: str = LIVE) -> Finding | None:
    """An integer buffer that was `before` and must be `due`, and is `now`."""
    key = Key(op, where, "buffer", "count")
    past = key._replace(op=op - 1)
    expected = {key: held("int64", due, shape=()), past: held("int64", before, shape=())}
    observed = {key: held("int64", now, shape=()), past: held("int64", before, shape=())}
    return counters.counter_off(*one(expected, observed, key))


def test_an_integer_buffer_may_be_a_counter() -> None:
    still = buffer(4, 5, 4)
    assert still is not None
    assert still.clause == "buffer of count did not count after operation 3 (step): 4 instead of 5"
    ahead = buffer(7, 5, 4)
    assert ahead is not None
    assert ahead.clause == "buffer of count is 2 ahead after operation 3 (step): 7 instead of 5"
    assert buffer(3, 5, 3) is None, "an earlier value that did not stand still by one"
    assert buffer(4, 5, 4, op=SAVE) is None, "no step"
    assert buffer(4, 5, 4, where=WRITTEN) is not None, "an earlier value is of live tensors"
    unknown = count("buffer", 2, 3, dtype="int64")
    assert unknown is not None, "also where nothing is known of it before the step"
    assert unknown.clause == "buffer of w is 1 ahead after operation 1 (step): 3 instead of 2"


MOMENTUM = live(LATER, "momentum", "w")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_a_momentum_that_begins_anew(dtype: str) -> None:
    before = MOMENTUM._replace(op=SAVE)
    scenario = replace(SCENARIO, optimizer=Optimizer.parse("sgd/momentum=0.5"))
    past, gradient = held(dtype, 2, 4, 8), (1, 3, 5)
    due = {before: past, MOMENTUM: held(dtype, 2, 5, 9)}
    wrong = {before: past, MOMENTUM: held(dtype, *gradient)}
    told = Finding(
        "likely",
        "momentum of w after operation 3 (step) is what a first step makes, without its value of operation 2 (save)",
        {"name": "w", "elements": 3},
    )
    difference, given = one(due, wrong, MOMENTUM, scenario)
    assert counters.counted_anew(difference, given) == told
    far = counters.roughly(dtype)
    for factor, close in ((1 + far / 2, True), (1 + 4 * far, False)):
        moved = wrong | {MOMENTUM: held(dtype, *(number * factor for number in gradient))}
        assert (counters.counted_anew(*one(due, moved, MOMENTUM, scenario)) is not None) is close
    for other in ({before: held(dtype, 2, 4, 7)}, {before: held("fp64" if dtype == "fp32" else "fp32", 2, 4)}):
        assert counters.counted_anew(difference, replace(given, observed=given.observed | other)) is None
    assert counters.counted_anew(difference, replace(given, expected={MOMENTUM: due[MOMENTUM]})) is None
    assert (
        counters.counted_anew(
            *one(due, wrong, MOMENTUM, replace(scenario, optimizer=Optimizer.parse("sgd/momentum=0.25")))
        )
        is None
    )
    setting = {live(SAVE, "hyperparameter", "group0.momentum"): number(0.25)}
    assert counters.counted_anew(*one(due | setting, wrong | setting, MOMENTUM, scenario)) is None
    zeros = {before: held(dtype, 0, 0, 0)}
    assert counters.counted_anew(*one(due | zeros, wrong | zeros, MOMENTUM, scenario)) is None


def test_only_a_momentum_after_a_step_begins_anew() -> None:
    for key in (MOMENTUM._replace(role="exp_avg"), MOMENTUM._replace(op=SAVE)):
        before = key._replace(op=key.op - 1)
        due = {before: fp32(2, 4, 8), key: fp32(2.8, 6.6, 12.2)}
        assert counters.counted_anew(*one(due, due | {key: fp32(1, 3, 5)}, key)) is None
    assert counters.counted_anew(*one(held("int64", 1), held("int64", 2), MOMENTUM)) is None
    assert counters.counted_anew(*one(fp32(1), fp32(1, 2), MOMENTUM)) is None
    assert counters.roughly("fp8e4m3") == 0


# --- groups -------------------------------------------------------------------------------------------


def number(value: float) -> Value:
    return held("fp64", value, shape=())


def group(key: str = "lr", got: float = 0.5, more: Logical | None = None, op: int = LATER) -> Finding | None:
    """What is said of a number that must be 0.25, and is another one."""
    at = live(op, "hyperparameter", f"group1.{key}")
    due = {at: number(0.25)} | (more or {})
    scenario = replace(SCENARIO, optimizer=Optimizer.parse("adamw/lr=0.75"))
    return counters.hyperparameter(*one(due, due | {at: number(got)}, at, scenario))


@pytest.mark.parametrize(
    ("key", "got", "more", "source"),
    [
        ("lr", 0.5, {live(LATER, "hyperparameter", "group0.lr"): number(0.5)}, "that of group0"),
        ("lr", 0.5, {live(LATER, "hyperparameter", "group0.eps"): number(0.5)}, "no known source"),
        ("lr", 0.5, {live(LATER, "hyperparameter", "group0.mylr"): number(0.5)}, "no known source"),
        ("lr", 0.5, {live(STEP, "hyperparameter", "group1.lr"): number(0.5)}, "its value of operation 1 (step)"),
        ("lr", 0.75, {}, "the optimizer's common setting"),
        ("lr", 0.001, {}, "torch's default"),
        ("step", 0.5, {}, "no known source"),
    ],
)
def test_a_number_of_a_group_and_where_it_may_be_from(key: str, got: float, more: Logical, source: str) -> None:
    assert group(key, got, more) == Finding(
        "likely" if source == "no known source" else "certain",
        f"group1.{key} is {got:g} instead of 0.25 after operation 3 (step): {source}",
        {"name": f"group1.{key}", "expected": 0.25, "observed": got, "source": source},
    )


def test_a_number_of_a_parameter_of_its_own() -> None:
    own, other = live(LATER, "hyperparameter", "a.b.lr"), live(LATER, "hyperparameter", "a.c.lr")
    for got, source in ((0.5, "that of a.c"), (0.001, "torch's default")):
        due = {own: number(0.25), other: number(0.5)}
        found = counters.hyperparameter(*one(due, due | {own: number(got)}, own))
        assert found is not None
        assert found.evidence["source"] == source


def test_numbers_of_groups_and_schedules_only() -> None:
    for role, known in (("hyperparameter", True), ("scheduler", True), ("step", False)):
        assert (counters.hyperparameter(*one(number(1), number(2), live(STEP, role, "group0.lr"))) is not None) is known
    texts = Value("utf8", (1,), b"a"), Value("utf8", (1,), b"b")
    assert counters.hyperparameter(*one(*texts, live(STEP, "hyperparameter", "group0.params"))) is None
    assert counters.hyperparameter(*one(number(1), fp32(1), live(STEP, "hyperparameter", "group0.lr"))) is None


def text(value: str) -> Value:
    data = value.encode()
    return Value("utf8", (len(data),), data)


@pytest.mark.parametrize(
    ("wanted", "got", "how"),
    [
        ("a\nb", "b\na", "has its parameters in another order"),
        ("a\nb", "a", "lacks ['b'] and has [] too many"),
        ("a", "c\nb", "lacks ['a'] and has ['b', 'c'] too many"),
        ("", "b", "lacks [] and has ['b'] too many"),
        ("a", None, "lacks ['a'] and has [] too many"),
        (None, "a", "lacks [] and has ['a'] too many"),
    ],
)
def test_members_of_a_group(wanted: str | None, got: str | None, how: str) -> None:
    key = live(LOAD, "hyperparameter", "group0.params")
    sides = [{} if value is None else {key: text(value)} for value in (wanted, got)]
    found = counters.group_members(*one(*sides, key))
    names = [value.split("\n") if value else [] for value in (wanted, got)]
    assert found == Finding(
        "certain", f"group0 {how} after operation 5 (load)",
        {"name": "group0.params", "expected": names[0], "observed": names[1]},
    )  # fmt: skip


def test_members_are_those_of_params_only() -> None:
    for key in (live(LOAD, "hyperparameter", "group0.lr"), live(LOAD, "setting", "group0.params")):
        assert counters.group_members(*one(text("a"), text("b"), key)) is None


@pytest.mark.parametrize(
    ("role", "fqn", "of"),
    [("setting", "group0.lr", "the key lr of group0"), ("setting", "a.b.lr", "the key lr of a.b"),
     ("schedule", "base.lr", "the key base.lr of the schedule")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("wanted", "got", "how"),
    [
        ("float", None, "is gone; it was `float`"),
        (None, "float", "is new: `float`"),
        ("float", "int", "is `int` instead of `float`"),
    ],
)
def test_a_key_that_changed(role: str, fqn: str, of: str, wanted: str | None, got: str | None, how: str) -> None:
    key = live(LOAD, role, fqn)
    sides = [{} if value is None else {key: text(value)} for value in (wanted, got)]
    assert counters.setting_changed(*one(*sides, key)) == Finding(
        "certain", f"{of} {how} after operation 5 (load)", {"name": fqn, "expected": wanted, "observed": got}
    )
    other = key._replace(role="hyperparameter")
    moved = [{} if value is None else {other: text(value)} for value in (wanted, got)]
    assert counters.setting_changed(*one(*moved, other)) is None


# --- what is absent -----------------------------------------------------------------------------------

RECALLED = Scenario(mesh=Mesh(1, 2, 1), program="build step keep step recall")
KEPT, RECALL = 2, 4


def missing(key: Key, scenario: Scenario = SCENARIO) -> tuple[Difference, Context]:
    return one({key: fp32(1)}, {}, key, scenario)


def extra(key: Key, more: Logical | None = None, value: Value | None = None) -> tuple[Difference, Context]:
    return one({k: v for k, v in (more or {}).items() if k != key}, {key: value or fp32(1), **(more or {})}, key)


def likely(key: Key, said: str) -> Finding:
    return Finding("likely", said, {"name": key.fqn, "role": key.role, "ranks": []})


def test_a_value_that_is_not_in_a_checkpoint() -> None:
    written = Key(SAVE, WRITTEN, "param", "w")
    told = likely(written, "written param of w is not in the checkpoint of operation 2 (save)")
    assert presence.not_saved(*missing(written)) == told
    assert presence.not_saved(*missing(written._replace(where=LIVE))) is None
    assert presence.not_saved(*extra(written)) is None
    assert presence.state_missing(*missing(written)) is None


def kept(key: Key, *others: Key) -> Finding | None:
    every = dict.fromkeys((key, *others), fp32(1))
    difference, given = one(every, {other: fp32(1) for other in others}, key, RECALLED)
    return presence.not_saved(difference, given)


def test_a_value_that_may_not_have_been_kept_in_memory() -> None:
    key, other = live(RECALL, "exp_avg", "w"), live(RECALL, "exp_avg", "v")
    there = key._replace(op=KEPT)
    assert kept(key, other, there) == Finding(
        "possible",
        "exp_avg of w was there when operation 2 (keep) took the state, and is not after operation 4 (recall), which "
        "may have left it out as well",
        {"name": "w", "role": "exp_avg", "kept_by": 2},
    )
    assert kept(key, other) is None, "it was not there"
    assert kept(key, there, other._replace(role="step")) is None, "nothing of the role was loaded"
    assert kept(key, there, other._replace(op=3)) is None
    assert kept(key._replace(op=3), there, other._replace(op=3)) is None, "no recall"
    twice = Scenario(mesh=Mesh(1, 2, 1), program="build keep recall keep recall")
    first = {live(op, "exp_avg", "w"): fp32(1) for op in (1, 3)} | {live(2, "exp_avg", "v"): fp32(1)}
    found = presence._perhaps_not_kept(live(2, "exp_avg", "w"), context_of({}, first, twice))
    assert found is not None
    assert found.evidence["kept_by"] == 1, "the last one before the recall"
    for role in presence.SPOKEN:
        assert kept(key._replace(role=role), other._replace(role=role), there._replace(role=role)) is None
    early = live(0, "exp_avg", "w")
    assert presence._perhaps_not_kept(early, context_of({}, {early._replace(fqn="v"): fp32(1)}, RECALLED)) is None


def test_a_value_that_does_not_exist() -> None:
    key = live(LOAD, "exp_avg", "w")
    assert presence.state_missing(*missing(key)) == likely(key, "exp_avg of w does not exist after operation 5 (load)")
    assert presence.state_missing(*extra(key)) is None
    for role in presence.SPOKEN:
        assert presence.state_missing(*missing(key._replace(role=role))) is None
    difference, given = missing(key)
    assert presence.state_missing(replace(difference, key=NOTHING), given) is None


@pytest.mark.parametrize("role", presence.LAZY_ROLES)
def test_state_that_an_operation_created(role: str) -> None:
    key = live(LOAD, role, "w")
    found = presence.initialising_step(*extra(key))
    assert found == Finding("certain", f"{role} of w was created by operation 5 (load)", {"name": "w", "role": role})
    assert presence.initialising_step(*extra(key, {key._replace(op=BUILD): fp32(2)})) is None, "it was there before"
    assert presence.initialising_step(*extra(key, {key._replace(op=SAVE): fp32(1)})) is None, "it was saved"
    assert presence.initialising_step(*extra(key, {key._replace(op=SAVE): fp32(0)}, fp32(0))) is not None
    assert presence.initialising_step(*extra(key._replace(op=LATER))) is None, "a step"
    assert presence.initialising_step(*extra(key._replace(where=WRITTEN))) is None
    assert presence.initialising_step(*missing(key)) is None
    assert presence.initialising_step(*extra(key._replace(role="master"))) is None


def test_an_overflow_creates_state_as_a_step_does() -> None:
    scenario = Scenario(mesh=Mesh(1, 2, 1), program="build overflow step")
    key = live(1, "exp_avg", "w")
    assert presence.initialising_step(*one({}, {key: fp32(1)}, key, scenario)) is None


MODEL_ONLY = Scenario(mesh=Mesh(1, 2, 1), program="build step save build load_model_only step")
ASKED = 4


def unasked(role: str, kind: str, *, saved: float = 1, op: int = ASKED, where: str = LIVE) -> Finding | None:
    key = Key(op, where, role, "w")
    due = {key._replace(op=2): fp32(saved)} | ({} if kind == "extra" else {key: fp32(9)})
    return presence.loaded_unasked(*one(due, due | {key: fp32(1)}, key, MODEL_ONLY))


def test_a_load_of_the_model_that_restored_more() -> None:
    told = "of w has its value of operation 2 (save) after operation 4 (load_model_only)"
    for role, kind in (("exp_avg", "extra"), ("hyperparameter", "extra"), ("hyperparameter", "bits")):
        assert unasked(role, kind) == Finding(
            "certain", f"{role} {told}", {"name": "w", "role": role, "value_of_op": 2}
        )
        assert unasked(role, kind, saved=2) is None
        assert unasked(role, kind, op=5) is None
        assert unasked(role, kind, where=WRITTEN) is None
    assert unasked("exp_avg", "bits") is None


def test_the_last_save_counts_that_has_the_value() -> None:
    key = live(LAST, "exp_avg", "w")
    twice = Scenario(mesh=Mesh(1, 2, 1), program="build save step save step build load")
    values = {key._replace(op=1): fp32(1), key._replace(op=3): fp32(1), key._replace(op=4): fp32(1)}
    assert presence._saved_as(key, context_of(values, {key: fp32(1)}, twice)) == 3
    assert presence._saved_as(key, context_of(values, {key: fp32(2)}, twice)) is None
    assert presence._saved_as(key, context_of(values, {}, twice)) is None
    at_once = Scenario(mesh=Mesh(1, 2, 1), program="build step begin_save finish_save build load")
    begun = {key._replace(op=2): fp32(1)}
    assert presence._saved_as(key._replace(op=3), context_of(begun, {key._replace(op=3): fp32(1)}, at_once)) == 2
    first = {key._replace(op=1): fp32(1)}
    assert presence._saved_as(key, context_of(first, {key: fp32(1)}, twice)) == 1
    at_zero = Scenario(mesh=Mesh(1, 2, 1), program="build save build load")
    assert (
        presence._saved_as(live(0, "exp_avg", "w"), context_of(first, {live(0, "exp_avg", "w"): fp32(1)}, at_zero))
        is None
    )


def test_what_a_library_warned_of() -> None:
    key = live(STEP, "warning", "rank0.0")
    said = text("UserWarning:  of\nthis " + "x" * 300)
    difference, given = one({}, {key: said}, key)
    found = presence.warned(replace(difference, ranks=(0,)), given)
    shown = ("UserWarning: of this " + "x" * 300)[:200]
    told = Finding("certain", f"rank0.0 says “{shown}” in operation 1 (step)", {"name": "rank0.0", "ranks": [0]})
    assert found == told
    assert presence.warned(*one({}, {key: Value("utf8", (2,), b"a\xff")}, key)) is not None
    assert presence.warned(replace(difference, kind="missing"), given) is None
    assert presence.warned(difference, replace(given, observed={})) is None
    other = key._replace(role="param")
    assert presence.warned(*one({}, {other: said}, other)) is None


@pytest.mark.parametrize(
    ("kind", "how"), [("missing", "has no mark"), ("extra", "is marked"), ("bits", "has another mark"), ("shape", "")]
)
def test_marks_of_tensor_parallel_parameters(kind: str, how: str) -> None:
    difference, given = one(held("int64", 0), held("int64", 1), live(0, "tag", "w"))
    difference = replace(difference, kind=kind)  # type: ignore[arg-type]
    told = Finding("certain", f"w {how} after operation 0 (build)", {"name": "w", "kind": kind})
    assert presence.marks(difference, given) == (told if how else None)
    assert presence.marks(replace(difference, key=live(0, "param", "w")), given) is None


def test_a_setting_that_was_resolved_otherwise() -> None:
    key = live(0, "resolved", "optimizer.lr")
    difference, given = one(text("0.1"), Value("utf8", (2,), b"1\xff"), key)
    assert presence.resolved_otherwise(difference, given) == Finding(
        "certain", "optimizer.lr is '1\ufffd' instead of '0.1' after operation 0 (build)",
        {"name": "optimizer.lr", "expected": "0.1", "observed": "1\ufffd"},
    )  # fmt: skip
    odd, given = one(Value("utf8", (1,), b"\xff"), text("a"), key)
    assert presence.resolved_otherwise(odd, given) is not None
    assert presence.resolved_otherwise(difference, replace(given, expected={})) is None
    assert presence.resolved_otherwise(difference, replace(given, observed={})) is None
    assert presence.resolved_otherwise(*one(text("a"), text("b"), key._replace(role="setting"))) is None


def test_a_checkpoint_that_describes_other_boxes_than_it_holds() -> None:
    detail = (
        "c at 7: key 'model.w': stored item: given 'fp32 of shape (2,)'; allowed: fp32 of shape (3,); for example: x"
    )
    difference, given = missing(Key(SAVE, WRITTEN, "checkpoint", "checkpoint"))
    unreadable = replace(difference, kind="unreadable", detail=detail)
    told = "model.w is fp32 of shape (2,), and was to be fp32 of shape (3,), after operation 2 (save)"
    assert presence.boxes_lie(unreadable, given) == Finding("certain", told, {"name": "checkpoint", "detail": detail})
    assert presence.boxes_lie(replace(unreadable, detail="something else"), given) is None
    assert presence.boxes_lie(replace(unreadable, kind="missing"), given) is None


def test_state_that_must_not_exist_and_shapes_that_are_wrong() -> None:
    key = live(LOAD, "exp_avg", "w")
    assert presence.state_invented(*extra(key)) == likely(key, "exp_avg of w exists after operation 5 (load)")
    assert presence.state_invented(*missing(key)) is None
    difference, given = one(fp32(1, 2), fp32(1), key)
    difference = replace(difference, kind="shape", detail="shape [1] instead of [2]", ranks=(1,))
    assert presence.wrong_shape(difference, given) == Finding(
        "likely", "exp_avg of w has shape [1] instead of [2] after operation 5 (load)",
        {"name": "w", "role": "exp_avg", "ranks": [1]},
    )  # fmt: skip
    assert presence.wrong_shape(replace(difference, kind="bits"), given) is None
    for role in presence.SPOKEN:
        assert presence.state_invented(*extra(key._replace(role=role))) is None
        assert presence.wrong_shape(replace(difference, key=key._replace(role=role)), given) is None


def test_a_context_without_operations_names_none() -> None:
    assert presence._kind(99, context()) == ""
    assert presence._kind(0, context()) == "build"
