"""What the judge finds beside bits: what some ranks lack, how an error is told, what is left out before it compares.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

from dataclasses import replace

import numpy as np
import pytest

from harness import judge as court
from harness.judge import Case
from harness.observe.logical import Key, Problem, Value
from harness.observe.record import LIVE, OWNER_ROLES, Record
from harness.program import expand
from harness.scenario import Mesh, Scenario


def held(rank: int, role: str, fqn: str = "w", *, data: bytes = b"\1\2\3\4", op: int = 1, where: str = LIVE) -> Record:
    return Record(op, rank, where, role, fqn, "fp32", (1,), (0,), (1,), data)


def lost(key: Key, *ranks: int) -> Problem:
    return Problem(key, "gap", ranks, f"ranks {list(ranks)} own some of the parameter and hold nothing of it")


@pytest.mark.parametrize("owned", ["master", "grad", "exp_avg_sq"])
@pytest.mark.parametrize("role", ["step", "exp_avg", "momentum"])
def test_an_owner_without_a_counter_or_a_moment_has_lost_it(owned: str, role: str) -> None:
    records = [held(0, owned), held(1, owned), held(2, owned), held(1, role)]
    assert court._losses(records) == [lost(Key(1, LIVE, role, "w"), 0, 2)]
    assert court._losses([*records, held(0, role), held(2, role)]) == []


def test_an_owner_without_the_hyperparameters_of_its_parameter_has_lost_them() -> None:
    records = [held(0, "master", "a.b"), held(1, "master", "a.b"), held(0, "hyperparameter", "a.b.lr")]
    assert court._losses(records) == [lost(Key(1, LIVE, "hyperparameter", "a.b.lr"), 1)]


@pytest.mark.parametrize(
    "other",
    [
        held(1, "master", data=b""),  # nothing of it is its own
        held(1, "master", op=2),
        held(1, "master", "v"),
        held(1, "master", where="written"),
        held(1, "param"),
        held(1, "step"),
    ],
)
def test_who_owns_nothing_of_it_there_and_then_has_lost_nothing(other: Record) -> None:
    assert court._losses([other, held(0, "master"), held(0, "step")]) == []
    assert court._losses([held(0, "master"), held(0, "step"), other]) == []


def test_a_counter_that_is_empty_is_none() -> None:
    records = [held(0, "master"), held(1, "master"), held(0, "step"), held(1, "step", data=b"")]
    assert court._losses(records) == [lost(Key(1, LIVE, "step", "w"), 1)]


def test_a_value_that_some_ranks_did_not_record() -> None:
    records = [held(0, "param"), held(2, "param"), held(1, "rng"), held(1, "param", where="written"), held(0, "step")]
    (found,) = court._absences(records, {1: 4}, OWNER_ROLES)
    assert found == Problem(Key(1, LIVE, "param", "w"), "gap", (1, 3), "ranks [1, 3] hold nothing of it")
    assert {p.key.role for p in court._absences(records, {1: 4}, frozenset())} == {"param", "step"}


def test_what_ranks_say_of_themselves_is_no_value() -> None:
    notes = [held(0, "emulated", data=b"b\na"), held(1, "emulated", data=b"a\n"), held(0, "device", data=b"H100")]
    kept, said = court._without_notes([held(0, "param"), *notes])
    assert kept == [held(0, "param")]
    assert said == {"emulated": ["a", "b"], "device": ["H100"]}


def test_an_operation_that_some_rank_did_not_complete_is_left_out() -> None:
    ops = expand(Scenario(mesh=Mesh(1, 2, 1), program="build step step", system="reference"))
    records = [held(0, "param", op=op) for op in (0, 1, 2)] + [held(1, "param", op=op) for op in (0, 1)]
    assert {r.op for r in court._finished(records, ops, complete=False)} == {0, 1}
    assert court._finished(iter(records), ops, complete=True) == records


def test_norms_are_those_that_are_numbers_of_their_dtype() -> None:
    norm = Key(3, LIVE, "norm", "total_norm")
    one = Value("fp32", (), np.float32(1.5).tobytes())
    assert court._reported_norms({norm: one, norm._replace(role="grad"): one}) == ((3, 1.5),)
    assert court._reported_norms({norm: Value("fp64", (), np.float64(2.5).tobytes())}) == ((3, 2.5),)
    for odd in (Value("fp32", (2,), one.data * 2), Value("bf16", (), b"\0\0"), Value("fp32", (), b"")):
        assert court._reported_norms({norm: odd}) == ()


def test_a_crash_of_the_reference_is_told_as_that_of_a_rank() -> None:
    axes = {"mesh": "1x2x1", "checkpoint": "gathered", "program": "restart", "faults": "step-left-on-the-host"}
    found, records, notes = court.run_reference(Case.of(Scenario.from_axes(axes)))
    crash = notes["crash"]
    assert {key: crash[key] for key in ("rank", "op", "stage", "errno")} == {
        "rank": 0, "op": "step", "stage": "op", "errno": None,
    }  # fmt: skip
    assert crash["op_index"] == max(r.op for r in records) + 1
    assert crash["type"] in crash["traceback"]
    assert crash["message"]
    assert crash["message"] in crash["traceback"]
    assert found.differences == ()


def test_a_fault_that_changed_nothing_had_no_effect_and_one_that_did_says_nothing_of_it() -> None:
    clean = Scenario.from_axes({"mesh": "1x2x1", "checkpoint": "gathered", "program": "train"})
    for fault, notes in (("no-op-load", {"no_effect": True}), ("demote-state", {})):
        case = Case.of(replace(clean, faults=(fault,)))
        found, records, told = court.run_reference(case)
        assert told == notes
        assert bool(found.differences) is not bool(notes)
        assert records
    assert court.run_reference(Case.of(clean))[1:] == ([], {})
