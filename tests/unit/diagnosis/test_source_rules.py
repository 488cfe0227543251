"""Rules about where values are from, on values made by hand: what each says, whole, and at which boundary it is silent.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from shardproof.diagnosis import Context, Finding
from shardproof.diagnosis.rules import sources
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.scenario import Mesh, Scenario

from tests.unit.diagnosis.test_diagnosis import context_of, live
from tests.unit.diagnosis.test_dtype_and_rank_rules import held, one
from tests.unit.diagnosis.test_rule_engine import BUILD, LAST, LATER, LOAD, SAVE, SCENARIO, STEP, fp32

W = live(LOAD, "exp_avg", "w")
RIGHT, WRONG = fp32(1, 2, 3, 4), fp32(1, 7, 8, 9)


def at(key: Key, **changes: object) -> Key:
    return key._replace(**changes)


def met(due: Logical, got: Logical, key: Key = W, scenario: Scenario = SCENARIO, cold: Logical | None = None
        ) -> tuple[Difference, Context]:  # fmt: skip
    """The difference at a key where all else is as it must be."""
    difference, given = one(due, due | got, key, scenario)
    return difference, replace(given, cold=cold or {})


def found(confidence: str, clause: str, **evidence: object) -> Finding:
    return Finding(confidence, clause, {"name": "w", **evidence})  # type: ignore[arg-type]


# --- another parameter's, another role's -----------------------------------------------------------------


def test_what_belongs_to_another_parameter() -> None:
    due = {W: RIGHT, at(W, fqn="v"): fp32(0, 7, 8, 9)}
    assert sources.other_parameter(*met(due, {W: WRONG})) == found(
        "certain", "exp_avg of w holds what belongs to v after operation 5 (load)", holds="v", elements=3
    )
    assert sources.other_parameter(*met(due, {W: fp32(1, 7, 8, 5)})) is None
    assert sources.other_parameter(*met({W: RIGHT}, {W: fp32(1, 2)})) is None
    for role in ("step", "hyperparameter", "scheduler", "scaler"):
        moved = {at(key, role=role): value for key, value in due.items()}
        assert sources.other_parameter(*met(moved, {at(W, role=role): WRONG}, at(W, role=role))) is None


def test_what_lies_inside_of_another_parameter() -> None:
    other = at(W, fqn="v")
    due = {W: RIGHT, other: fp32(0, 6, 7, 8, 9, 5)}
    wrong = {W: fp32(6, 7, 8, 9)}
    told = "exp_avg of w holds what belongs to v from element 1 on after operation 5 (load)"
    assert sources.other_parameter(*met(due, wrong)) == found("certain", told, holds="v", at=1, elements=4)
    first = due | {other: fp32(6, 7, 8, 9, 5)}
    begun = sources.other_parameter(*met(first, wrong))
    assert begun is not None
    assert begun.evidence["at"] == 0
    assert sources.other_parameter(*met(due | {other: fp32(6, 7, 8, 5, 9)}, wrong)) is None
    assert sources.other_parameter(*met(due | {other: Value("int32", (6,), due[other].data)}, wrong)) is None
    assert sources.other_parameter(*met(due, {W: fp32(9, 9, 5, 5)})) is None, "two different elements"
    across = Value("fp32", (6,), (b"\0\0" + wrong[W].data + bytes(6)))
    assert sources.other_parameter(*met(due | {other: across}, wrong)) is None
    step = {at(key, op=LATER): value for key, value in due.items()}
    assert sources.other_parameter(*met(step, {at(W, op=LATER): wrong[W]}, at(W, op=LATER))) is None
    twice = sources.other_parameter(*met(due | {other: fp32(6, 7, 8, 9, 6, 7, 8, 9)}, wrong))
    assert twice is not None
    assert twice.evidence["at"] == 0, "the first of two"
    in_bytes = {W: Value("uint8", (4,), bytes(4)), other: due[other]}
    assert sources.other_parameter(*met(in_bytes, {W: Value("uint8", (4,), bytes([6, 7, 8, 9]))})) is None
    same = due | {other: Value("fp32", (2, 2), fp32(6, 7, 8, 9).data)}
    assert sources._stretch_of_another(*_with_pair(met(same, wrong))) is None, "it is no larger"


def _with_pair(given: tuple[Difference, Context]):  # type: ignore[no-untyped-def]
    difference, context = given
    return difference, context.pair(difference), context


A, B, C = (at(W, fqn=name) for name in "abc")
EACH = {A: fp32(1, 2), B: fp32(3, 4), C: fp32(5, 6)}


def test_whole_tensors_under_each_others_names() -> None:
    swapped = {A: EACH[B], B: EACH[A]}
    assert sources.permuted_parameters(*met(EACH, swapped, A)) == Finding(
        "certain", "exp_avg after operation 5 (load): a holds b's, b holds a's",
        {"name": "a", "holds": "b", "permutation": {"a": "b", "b": "a"}, "roles": ["exp_avg"]},
    )  # fmt: skip
    assert sources.permuted_parameters(*met(EACH, {A: EACH[B]}, A)) is None
    assert sources.permuted_parameters(*met(EACH, swapped | {C: fp32(9, 9)}, A)) is None
    written = {at(key, where=WRITTEN): value for key, value in EACH.items()}
    found_written = sources.permuted_parameters(
        *met(written, {at(key, where=WRITTEN): value for key, value in swapped.items()}, at(A, where=WRITTEN))
    )
    assert found_written is not None
    assert found_written.clause.startswith("written exp_avg after")
    counters = {at(key, role="step"): value for key, value in EACH.items()}
    moved = {at(key, role="step"): value for key, value in swapped.items()}
    assert sources.permuted_parameters(*met(counters, moved, at(A, role="step"))) is None


def test_a_tensor_under_the_name_of_one_of_another_dtype() -> None:
    due = {A: held("bf16", 1, 2), B: fp32(3 + 2**-20, 4)}
    in_their_dtypes = {A: held("bf16", 3, 4), B: fp32(1, 2)}
    told = sources.permuted_parameters(*met(due, in_their_dtypes, A))
    assert told is not None
    assert told.evidence["permutation"] == {"a": "b", "b": "a"}
    counted = {A: held("int64", 1, 2), B: fp32(3, 4)}
    assert sources.permuted_parameters(*met(counted, {A: held("int64", 3, 4), B: fp32(1, 2)}, A)) is None


def test_roles_that_were_exchanged_alike_are_named_together() -> None:
    roles = ("param", "master", "exp_avg", "momentum")
    due = {at(key, role=role): value for role in roles for key, value in EACH.items()}
    swapped = {at(A, role=role): EACH[B] for role in roles[:3]} | {at(B, role=role): EACH[A] for role in roles[:3]}
    other = {at(B, role="momentum"): EACH[C], at(C, role="momentum"): EACH[B]}
    told = sources.permuted_parameters(*met(due, swapped | other, A))
    assert told is not None
    assert told.clause.startswith("param, master and exp_avg after")
    assert told.evidence["roles"] == ["param", "master", "exp_avg"]
    assert sources.listed(["a"]) == "a"
    assert sources.listed(["a", "b"]) == "a and b"
    others = {at(key, op=LATER): value for key, value in swapped.items()}
    assert sources._permutation(A, context_of(EACH, others, SCENARIO)) == {}


def test_what_belongs_to_another_role() -> None:
    due = {W: RIGHT, at(W, role="exp_avg_sq"): fp32(0, 7, 8, 9)}
    assert sources.other_role(*met(due, {W: WRONG})) == found(
        "certain", "exp_avg of w holds its exp_avg_sq after operation 5 (load)", holds="exp_avg_sq", elements=3
    )
    assert sources.other_role(*met(due, {W: fp32(1, 7, 8, 5)})) is None
    assert sources.other_role(*met(due, {W: fp32(1)})) is None
    counter = {at(W, role="step"): RIGHT, at(W, role="param"): fp32(0, 7, 8, 9)}
    assert sources.other_role(*met(counter, {at(W, role="step"): WRONG}, at(W, role="step"))) is None


# --- what a load left as it was --------------------------------------------------------------------------


def load(got: Value, before: Logical, key: Key = W, scenario: Scenario = SCENARIO, due: Value = RIGHT,
         more: Logical | None = None) -> Finding | None:  # fmt: skip
    return sources.load_did_nothing(*met({key: due, **before}, {key: got, **(more or {})}, key, scenario))


def test_a_load_that_did_nothing() -> None:
    built = {at(W, op=BUILD): fp32(1, 7, 8, 9)}
    some = "3 of 4 elements of exp_avg of w are unchanged by operation 5 (load)"
    told = found(
        "certain",
        f"{some} and still have its initialisation by operation 4 (build)",
        role="exp_avg",
        unchanged_since=BUILD,
    )
    assert load(WRONG, built) == told
    whole = load(fp32(6, 7, 8, 9), {at(W, op=BUILD): fp32(6, 7, 8, 9)})
    assert whole is not None
    assert whole.clause == (
        "exp_avg of w is unchanged by operation 5 (load) and still has its initialisation by operation 4 (build)"
    )
    assert load(WRONG, {at(W, op=BUILD): fp32(1, 7, 8, 5)}) is None
    assert load(WRONG, {}) is None
    assert load(WRONG, {at(W, op=LATER): WRONG}) is None
    few = load(fp32(1, 2, 3, 9), {at(W, op=BUILD): fp32(1, 2, 3, 9)})
    assert few is not None
    assert few.confidence == "likely"
    two = load(fp32(1, 2, 8, 9), {at(W, op=BUILD): fp32(1, 2, 8, 9)})
    assert two is not None
    assert two.confidence == "likely"
    written = at(W, where=WRITTEN)
    assert load(WRONG, {at(written, op=BUILD): WRONG}, written) is None
    save = at(W, op=SAVE)
    assert load(WRONG, {at(W, op=STEP): WRONG}, save) is None, "no load"


ROLLED_BACK = Scenario(mesh=Mesh(1, 2, 1), program="build step save step load reload_params")


def test_a_load_into_what_had_been_stepped() -> None:
    key = at(W, op=4)
    told = load(WRONG, {at(W, op=3): WRONG}, key, ROLLED_BACK)
    assert told is not None
    assert told.clause == "3 of 4 elements of exp_avg of w are unchanged by operation 4 (load)"
    since = load(WRONG, {at(W, op=3): WRONG, at(W, op=0): WRONG}, key, ROLLED_BACK)
    assert since is not None
    assert since.clause.endswith("and still have its initialisation by operation 0 (build)")
    assert load(WRONG, {at(W, op=4): WRONG}, at(W, op=5), ROLLED_BACK, more={}) is not None, "a refresh"


EPOCH, RATE = live(LOAD, "scheduler", "last_epoch"), live(LOAD, "scheduler", "last_lr.0")


def schedule(epoch: float, rate: float, op: int = LOAD, where: str = LIVE) -> Logical:
    return {at(EPOCH, op=op, where=where): fp32(epoch), at(RATE, op=op, where=where): fp32(rate)}


def test_a_load_that_left_the_schedule_as_it_was() -> None:
    before, due = schedule(0, 4, BUILD), schedule(2, 4)
    difference, context = met(before | due, schedule(0, 4), EPOCH)
    assert sources.schedule_unchanged(EPOCH, context)
    told = Finding(
        "certain",
        "the learning-rate schedule is unchanged by operation 5 (load)",
        {"name": "last_epoch", "role": "scheduler", "unchanged_since": BUILD},
    )
    assert sources.load_did_nothing(difference, context) == told
    assert not sources.schedule_unchanged(EPOCH, context_of(before | due, schedule(0, 3), SCENARIO)), "a rate is not"
    same = context_of(before | schedule(0, 4), schedule(0, 4), SCENARIO)
    assert not sources.schedule_unchanged(EPOCH, same), "it was to change nothing"
    loaded = context_of(before | due, due, SCENARIO)
    assert not sources.schedule_unchanged(EPOCH, loaded)


def test_what_is_no_schedule_that_a_load_left_as_it_was() -> None:
    for op, where in ((LATER, LIVE), (LOAD, WRITTEN)):
        given = context_of(
            schedule(0, 4, op - 1, where) | schedule(2, 4, op, where), schedule(0, 4, op, where), SCENARIO
        )
        assert not sources.schedule_unchanged(at(EPOCH, op=op, where=where), given)
    step = at(EPOCH, role="step")
    given = context_of({at(step, op=BUILD): fp32(0), step: fp32(2)}, {step: fp32(0)}, SCENARIO)
    assert not sources.schedule_unchanged(step, given)


def test_a_load_of_the_model_alone_that_did_nothing() -> None:
    scenario = Scenario(mesh=Mesh(1, 2, 1), program="build step save build load_model_only")
    key = live(4, "param", "w")
    assert load(WRONG, {at(key, op=3): WRONG}, key, scenario) is not None


def test_a_master_whose_parameter_was_loaded_is_a_stale_copy() -> None:
    master = at(W, role="master")
    before = {at(master, op=BUILD): WRONG}
    assert load(WRONG, before, master) is not None
    param = at(W, role="param")
    assert load(WRONG, before | {param: RIGHT}, master) is None
    assert load(WRONG, before | {param: RIGHT}, master, more={param: fp32(9)}) is not None
    assert load(WRONG, {at(W, op=BUILD): WRONG, param: RIGHT}) is not None, "a moment is no copy of it"


def test_state_that_is_still_absent_after_a_load() -> None:
    def absent(due: Logical, got: Logical) -> Finding | None:
        return sources.load_did_nothing(*one(due, got, W))

    assert absent({W: RIGHT}, {}) == found(
        "likely", "exp_avg of w is still absent after operation 5 (load)", role="exp_avg", unchanged_since=BUILD
    )
    assert absent({W: RIGHT, at(W, op=BUILD): RIGHT}, {}) is None, "it was there"
    assert absent({W: RIGHT}, {at(W, fqn="v"): RIGHT}) is None, "others of its role were loaded"
    assert absent({W: RIGHT}, {at(W, fqn="v", role="step"): RIGHT}) is not None
    assert sources.load_did_nothing(*one({W: RIGHT}, {W: fp32(1)}, W)) is None


TWICE = Scenario(mesh=Mesh(1, 2, 1), program="build step keep step recall step recall")
FIRST, SECOND = 4, 6


def test_what_was_kept_in_memory_changed_with_the_live_state() -> None:
    key = at(W, op=SECOND)
    due = {at(W, op=op): RIGHT for op in (FIRST, SECOND)} | {at(W, op=5): WRONG}
    assert sources.kept_state_changed(*met(due, {key: WRONG}, key, TWICE)) == found(
        "certain",
        "exp_avg of w is unchanged by operation 6 (recall), though operation 4 (recall) restored it",
        role="exp_avg", restored_by=FIRST,
    )  # fmt: skip
    assert sources.kept_state_changed(*met(due, {key: WRONG, at(W, op=FIRST): WRONG}, key, TWICE)) is None
    assert sources.kept_state_changed(*met(due, {key: fp32(1, 7, 8, 5)}, key, TWICE)) is None
    missing = {at(W, op=op): RIGHT for op in (FIRST, SECOND)}
    assert sources.kept_state_changed(*met(missing, {key: WRONG}, key, TWICE)) is None
    once = at(W, op=FIRST)
    assert sources.kept_state_changed(*met({once: RIGHT, at(W, op=3): WRONG}, {once: WRONG}, once, TWICE)) is None
    stepped = at(W, op=5)
    assert sources.kept_state_changed(*met({stepped: RIGHT, once: WRONG}, {stepped: WRONG}, stepped, TWICE)) is None
    assert sources.kept_state_changed(*one({key: RIGHT, at(W, op=5): WRONG}, {key: fp32(1)}, key, TWICE)) is None
    written = {at(k, where=WRITTEN): v for k, v in due.items()}
    assert (
        sources.kept_state_changed(*met(written, {at(key, where=WRITTEN): WRONG}, at(key, where=WRITTEN), TWICE))
        is None
    )
    assert not sources._recalls(99, context_of({}, {}, TWICE))
    three = Scenario(mesh=Mesh(1, 2, 1), program="build step keep step recall step recall step recall")
    third = at(W, op=8)
    values = {at(W, op=op): RIGHT for op in (4, 6, 8)} | {at(W, op=7): WRONG}
    told = sources.kept_state_changed(*met(values, {third: WRONG}, third, three))
    assert told is not None
    assert told.evidence["restored_by"] == 6


# --- earlier, later ---------------------------------------------------------------------------------------


def test_values_of_an_earlier_moment() -> None:
    stepped = {W: RIGHT, at(W, op=STEP): WRONG, at(W, op=0): fp32(5, 5, 5, 5)}
    assert sources.stale_value(*met(stepped, {W: WRONG})) == found(
        "certain",
        "exp_avg of w has its value of operation 1 (step) after operation 5 (load)",
        value_of_op=STEP,
        elements=3,
    )
    assert sources.initial_value(*met(stepped, {W: WRONG})) is None
    initial = {W: RIGHT, at(W, op=0): WRONG, at(W, op=STEP): WRONG}
    assert sources.initial_value(*met(initial, {W: WRONG})) == found(
        "certain", "exp_avg of w has its initialisation by operation 0 (build) after operation 5 (load)",
        value_of_op=0, elements=3,
    )  # fmt: skip
    assert sources.stale_value(*met(initial, {W: WRONG})) is None
    thrice = sources.initial_value(*met(initial | {at(W, op=LATER): WRONG}, {W: WRONG}))
    assert thrice is not None
    assert thrice.evidence["value_of_op"] == 0
    twice = stepped | {at(W, op=LATER): WRONG}
    latest = sources.stale_value(*met(twice, {W: WRONG}))
    assert latest is not None
    assert latest.evidence["value_of_op"] == LATER
    assert sources.stale_value(*met(stepped, {W: fp32(1, 7, 8, 5)})) is None
    for role in ("step", "scheduler"):
        moved = {at(key, role=role): value for key, value in stepped.items()}
        assert sources.stale_value(*met(moved, {at(W, role=role): WRONG}, at(W, role=role))) is None
    assert sources.stale_value(*met(stepped, {W: fp32(1)})) is None
    few = sources.stale_value(*met({W: RIGHT, at(W, op=STEP): fp32(1, 2, 3, 9)}, {W: fp32(1, 2, 3, 9)}))
    assert few is not None
    assert few.confidence == "likely"


def test_values_of_a_later_step_in_a_save() -> None:
    stored = at(W, op=SAVE, where=WRITTEN)
    due = {stored: RIGHT, at(W, op=LATER): WRONG}
    assert sources.later_value(*met(due, {stored: WRONG}, stored)) == found(
        "certain",
        "written exp_avg of w is of step 2 (operation 3 (step)), the save of step 1",
        role="exp_avg", of_step=2, save_of_step=1, elements=3,
    )  # fmt: skip
    assert sources.later_value(*met(due, {stored: fp32(1, 7, 8, 5)}, stored)) is None
    lively = at(stored, where=LIVE)
    assert sources.later_value(*met(due | {lively: RIGHT}, {lively: WRONG}, lively)) is None
    elsewhere = at(stored, op=STEP)
    assert sources.later_value(*met({elsewhere: RIGHT, at(W, op=SAVE): WRONG}, {elsewhere: WRONG}, elsewhere)) is None
    assert sources.later_value(*met(due, {stored: fp32(1)}, stored)) is None


# --- the run that never loaded ---------------------------------------------------------------------------


def test_values_of_the_run_that_never_loaded() -> None:
    cold = {W: fp32(0, 7, 8, 9)}
    assert sources.load_without_effect(*met({W: RIGHT}, {W: WRONG}, cold=cold)) == found(
        "certain", "exp_avg of w is as in the cold run after operation 5 (load)", elements=3
    )
    assert sources.load_without_effect(*met({W: RIGHT}, {W: fp32(1, 7, 8, 5)}, cold=cold)) is None
    assert sources.load_without_effect(*met({W: RIGHT}, {W: WRONG})) is None
    assert sources.load_without_effect(*met({W: RIGHT}, {W: fp32(1)}, cold=cold)) is None
    after = at(W, op=LAST)
    assert sources.load_without_effect(*met({after: RIGHT}, {after: WRONG}, after, cold={after: WRONG})) is None
    assert sources.stale_copy_won(*met({W: RIGHT}, {W: WRONG}, cold=cold)) is None


def test_a_step_that_started_from_before_the_load() -> None:
    after = at(W, op=LAST)
    cold = {after: WRONG}
    bare = sources.stale_copy_won(*met({after: RIGHT}, {after: WRONG}, after, cold=cold))
    assert bare == found("certain", "exp_avg of w is as in the cold run after operation 6 (step)", elements=3)
    start = {at(W, op=op): fp32(5, 5, 5, 5) for op in (BUILD, LOAD)}
    assert sources.stale_copy_won(*met({after: RIGHT}, {after: WRONG}, after, cold=cold | start)) == found(
        "certain",
        "exp_avg of w after operation 6 (step) is the update of its initialisation by operation 4 (build), not of what "
        "operation 5 (load) loaded",
        elements=3, started_from=BUILD, loaded_by=LOAD,
    )  # fmt: skip
    earlier = start | {at(W, op=LATER): fp32(5, 5, 5, 5)}
    since = sources.stale_copy_won(*met({after: RIGHT}, {after: WRONG}, after, cold=cold | earlier))
    assert since is not None
    assert since.evidence["started_from"] == LATER
    begin = {at(W, op=op): fp32(5, 5, 5, 5) for op in range(LAST)}
    first = sources.stale_copy_won(*met({after: RIGHT}, {after: WRONG}, after, cold=cold | begin))
    assert first is not None
    assert first.evidence["started_from"] == 0
    assert sources.stale_copy_won(*met({after: RIGHT}, {after: fp32(1, 7, 8, 5)}, after, cold=cold)) is None
    no_load = at(W, op=LATER)
    told = sources.stale_copy_won(
        *met({no_load: RIGHT}, {no_load: WRONG}, no_load, cold={no_load: WRONG, at(W, op=SAVE): RIGHT})
    )
    assert told is not None
    assert told.clause == "exp_avg of w is as in the cold run after operation 3 (step)"
    values = {at(W, op=op): fp32(number) for op, number in ((LATER, 2), (BUILD, 1), (LOAD, 1))}
    assert sources._start_of_cold(after, replace(context_of({}, {}, SCENARIO), cold=values)) == BUILD
    last = values | {at(W, op=LOAD): fp32(3)}
    assert sources._start_of_cold(after, replace(context_of({}, {}, SCENARIO), cold=last)) == LOAD
    assert sources._last_load(LAST, context_of({}, {}, SCENARIO)) == LOAD
    assert sources._last_load(LOAD, context_of({}, {}, SCENARIO)) is None
    assert sources._last_load(LAST + 1, context_of({}, {}, SCENARIO)) == LOAD


# --- remainders ------------------------------------------------------------------------------------------

MASTER = at(W, role="master")


def bits(*patterns: int) -> Value:
    return Value("fp32", (len(patterns),), np.array(patterns, np.uint32).tobytes())


def test_remainders_that_were_taken_for_masters() -> None:
    due = {MASTER: bits(0x3F80_0005, 0x4000_FFFF, 0x4040_8000, 0x4080_0000)}
    wrong = {MASTER: fp32(5, -1, -32768, 0)}
    assert sources.remainder_as_value(*met(due, wrong, MASTER)) == found(
        "certain",
        "master of w after operation 5 (load) holds the low 16 bits of its values, as whole numbers",
        elements=4,
    )
    assert sources.remainder_as_value(*met(due, {MASTER: fp32(5, 65535, -32768, 0)}, MASTER)) is None
    moved = {at(MASTER, role="param"): due[MASTER]}
    assert sources.remainder_as_value(*met(moved, {at(W, role="param"): wrong[MASTER]}, at(W, role="param"))) is None
    half = {MASTER: held("bf16", 1, 2)}
    assert sources.remainder_as_value(*met(half, {MASTER: held("bf16", 0, 0)}, MASTER)) is None
    assert sources.remainder_as_value(*met(due, {MASTER: fp32(1)}, MASTER)) is None


def stale(got: Value, param: Value | None, earlier: Value, role: str = "master") -> Finding | None:
    key = at(MASTER, role=role)
    due = {key: bits(0x3F80_1111, 0x4000_2222, 0x4040_3333), at(key, op=STEP): earlier}
    more = {} if param is None else {at(W, role="param"): param}
    return sources.stale_remainder(*met(due | more, {key: got}, key))


def test_low_bits_that_were_not_refreshed() -> None:
    param = held("bf16", 1, 2, 3)
    before = bits(0x7777_4444, 0x7777_5555, 0x7777_9666)
    got = bits(0x3F80_4444, 0x4000_5555, 0x403F_9666)
    told = (
        "master of w after operation 5 (load) is the parameter with the low 16 bits of its value of operation 1 (step)"
    )
    assert stale(got, param, before) == found("certain", told, value_of_op=STEP, elements=3)
    assert stale(bits(0x3F80_4444, 0x4000_5555, 0x403F_9667), param, before) is None
    assert stale(bits(0x3F80_4444, 0x4000_5555, 0x4040_9666), param, before) is None, "it rounds to another parameter"
    assert stale(got, None, before) is None
    assert stale(got, fp32(1, 2, 3), before) is None
    assert stale(got, param, before, "exp_avg") is None
    assert stale(fp32(1), param, before) is None
    half = bits(0x3F80_7FFF, 0x4000_5555, 0x403F_9666)
    assert stale(half, param, bits(0x7777_7FFF, 0x7777_5555, 0x7777_9666)) is not None, "it rounds down"
    one_only = stale(bits(0x3F80_4444, 0x4000_2222, 0x4040_3333), param, before)
    assert one_only is not None
    assert one_only.confidence == "likely"


@pytest.mark.parametrize(
    ("got", "confidence"), [((1, 0, 0, 4), "likely"), ((1, 2, 3, 0), "possible"), ((1, 0, 9, 4), "")]
)
def test_elements_that_are_zero(got: tuple[float, ...], confidence: str) -> None:
    count = sum(number == 0 for number in got)
    told = found(confidence, f"{count} of 4 elements of exp_avg of w are zero after operation 5 (load)", elements=count)
    assert sources.zeroed(*met({W: RIGHT}, {W: fp32(*got)})) == (told if confidence else None)
    assert sources.zeroed(*met({W: held("int64", 1)}, {W: held("int64", 0)})) is None
    assert sources.zeroed(*met({W: RIGHT}, {W: fp32(0)})) is None
    half = Value("bf16", (1,), np.array([0], ml_dtypes.bfloat16).tobytes())
    assert sources.zeroed(*met({W: held("bf16", 1)}, {W: half})) is not None
