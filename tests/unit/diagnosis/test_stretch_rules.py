"""Rules about a part of a tensor, on values made by hand: what each says, whole, and at which boundary it is silent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shardproof.diagnosis import Context, Finding
from shardproof.diagnosis.rules import stretches
from shardproof.diff import Difference
from shardproof.observe.logical import Key, Logical
from shardproof.observe.record import WRITTEN, Record
from shardproof.scenario import Mesh, Scenario

from tests.unit.diagnosis.test_diagnosis import live
from tests.unit.diagnosis.test_dtype_and_rank_rules import held
from tests.unit.diagnosis.test_piece_rules import flat
from tests.unit.diagnosis.test_rule_engine import fp32
from tests.unit.diagnosis.test_source_rules import at, found, met

TWO_SAVES = Scenario(mesh=Mesh(1, 2, 1), program="build step save step save restart build load step")
FIRST_SAVE, SECOND_STEP, SECOND_SAVE, BUILD, LOAD, LAST = 2, 3, 4, 5, 6, 7
OLD, NEW, FRESH = (1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0), (0.0, 0.0, 0.0, 0.0)
W = live(LOAD, "exp_avg", "w")
V = at(W, fqn="v")
WROTE = at(W, op=SECOND_SAVE, where=WRITTEN)


def history(key: Key) -> Logical:
    """What a tensor must be from the first save to the load that restores the second one."""
    values = {FIRST_SAVE: OLD, SECOND_STEP: NEW, SECOND_SAVE: NEW, BUILD: FRESH, LOAD: NEW}
    return {at(key, op=op): fp32(*numbers) for op, numbers in values.items()}


def torn(got: Logical, key: Key, due: Logical, records: tuple[Record, ...] = ()) -> Finding | None:
    difference, given = met(due, got, key, TWO_SAVES)
    return stretches.torn_save(difference, replace(given, records=records))


# --- a checkpoint of two saves ---------------------------------------------------------------------------


def test_one_tensor_is_of_an_earlier_save_and_others_are_not() -> None:
    due = history(W) | history(V)
    told = found("likely", "exp_avg of w after operation 6 (load) is of step 1, and others of step 2",
                 role="exp_avg", of_step=1, save_of_step=2)  # fmt: skip
    assert torn({W: fp32(*OLD)}, W, due) == told
    assert torn({W: fp32(*OLD), V: fp32(*OLD)}, W, due) is None, "a whole role may be a stale copy"
    assert torn({W: fp32(9, 9, 9, 9)}, W, due) is None


def test_the_file_of_one_rank_is_of_an_earlier_save() -> None:
    due = history(W) | {WROTE: fp32(*NEW)}
    mixed = fp32(*NEW[:2], *OLD[2:])
    of_ranks, keys = ((0, NEW[:2]), (1, OLD[2:])), (WROTE, at(W, op=SECOND_SAVE))
    pieces = tuple(flat(key, rank, 2 * rank, np.array(part), (4,)) for key in keys for rank, part in of_ranks)
    said = torn({WROTE: mixed}, WROTE, due, pieces)
    assert said is not None
    assert said.clause == (
        "of written exp_avg of w after operation 4 (save), what rank 1 wrote is of step 1, and the rest of step 2"
    )
    assert (said.confidence, said.evidence["ranks"]) == ("likely", [1])
    loaded = torn({W: mixed}, W, history(W), pieces)
    assert loaded is not None
    assert loaded.evidence["ranks"] == [1]
    assert torn({WROTE: fp32(OLD[0], *NEW[1:])}, WROTE, due, pieces) is None, "half of a share"


def test_what_was_in_memory_before_the_load_is_no_torn_save() -> None:
    due = history(W) | history(V) | {at(W, op=BUILD): fp32(*OLD)}
    assert torn({W: fp32(*OLD)}, W, due) is None
    assert torn({at(W, op=SECOND_STEP): fp32(*OLD)}, at(W, op=SECOND_STEP), due) is None, "no load and no save"


# --- memory that nobody wrote ---------------------------------------------------------------------------

NOISE = (3e30, -2e-33, 7e15, 4e-30, -9e25, 6e-25, 2e20, 5e-20)


def unwritten(due: tuple[float, ...], got: tuple[float, ...], dtype: str = "fp32") -> Finding | None:
    return stretches.unwritten_memory(*met({W: held(dtype, *due)}, {W: held(dtype, *got)}, W, TWO_SAVES))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_values_of_any_exponent(dtype: str) -> None:
    said = unwritten((1.0,) * 9, (1.0, *NOISE), dtype)
    assert said is not None
    assert (said.confidence, said.evidence) == ("certain", {"name": "w", "role": "exp_avg", "elements": 8})
    assert said.clause == (
        "8 elements of exp_avg of w after operation 6 (load) lie between 2e-33 and 3e+30, where none must be beyond 1"
    )


def test_few_strange_values_are_less_certain_and_plain_ones_are_none() -> None:
    few = unwritten((1.0,) * 4, (1.0, *NOISE[:3]))
    assert few is not None
    assert few.confidence == "likely"
    assert unwritten((1.0,) * 4, (1.0, *NOISE[:2], 2.0)) is None, "two are chance"
    assert unwritten((1.0,) * 9, (1.0, *(2.0**30 * n for n in range(1, 9)))) is None, "a scale"
    assert unwritten((1.0,) * 9, (1.0, *NOISE[:3], 2, 3, 4, 5, 6)) is None, "most are plain"
    assert unwritten((1.0,) * 4, (1.0, np.inf, np.nan, 2.0)) is None, "an overflow"


def test_noise_in_copies_that_differ() -> None:
    due = (1.0,) * 8
    records = tuple(flat(W, rank, 0, np.array(part), (8,)) for rank, part in ((0, due), (1, NOISE)))
    _, given = met({W: fp32(*due)}, {W: fp32(*NOISE)}, W, TWO_SAVES)
    given = replace(given, observed={})
    conflict = Difference(W, "replica_conflict", (0, 1))
    said = stretches.unwritten_memory(conflict, replace(given, records=records))
    assert said is not None
    assert said.evidence["elements"] == 8
    equal = tuple(flat(W, rank, 0, np.array(part), (8,)) for rank, part in ((0, due), (1, (2.0,) * 8)))
    assert stretches.unwritten_memory(conflict, replace(given, records=equal)) is None


# --- steps of another length -----------------------------------------------------------------------------

P = live(LAST, "param", "w")
START = (1.0, -2.0, 3.0, 0.5, 4.0)
DUE = (1.5, -2.25, 3.125, 0.0, 4.5)


def stepped(got: tuple[float, ...], key: Key = P, dtype: str = "fp32", before: tuple[float, ...] = START
            ) -> tuple[Difference, Context]:  # fmt: skip
    due = {key: held(dtype, *DUE), at(key, op=LOAD): held(dtype, *START), at(key, role="grad"): fp32(1, 2)}
    return met(due, {key: held(dtype, *got), at(key, op=LOAD): held(dtype, *before)}, key, TWO_SAVES)


def further(times: float, first: int = 0) -> tuple[float, ...]:
    return tuple(s + (times if i >= first else 1) * (d - s) for i, (s, d) in enumerate(zip(START, DUE, strict=True)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("times", [2.0, 0.5, -1.0])
def test_all_went_the_same_number_of_times_as_far(times: float, dtype: str) -> None:
    said = stretches.moved_by_a_factor(*stepped(further(times), dtype=dtype))
    assert said is not None
    assert said.clause == f"param of w went {times:.4g} times as far as operation 7 (step) must move them"
    assert said.evidence["factor"] == times
    part = stretches.moved_by_a_factor(*stepped(further(times, first=1), dtype=dtype))
    assert part is not None
    assert part.clause.startswith("4 of 5 elements of param of w went")


def test_what_is_no_factor() -> None:
    assert stretches.moved_by_a_factor(*stepped((2.0, -2.5, 3.25, -0.5, 4.75))) is None, "one went another way"
    assert stretches.moved_by_a_factor(*stepped(further(1.001))) is None, "a rounding"
    assert stretches.moved_by_a_factor(*stepped(START)) is None, "not at all"
    assert stretches.moved_by_a_factor(*stepped(further(2.0, first=3))) is None, "two are chance"
    assert stretches.moved_by_a_factor(*stepped(further(2.0), at(P, role="exp_avg"))) is None
    assert stretches.moved_by_a_factor(*stepped(further(2.0), before=DUE)) is None, "it started from elsewhere"
    loaded = at(P, op=LOAD)
    due = {loaded: fp32(*DUE), at(P, op=BUILD): fp32(*START)}
    assert stretches.moved_by_a_factor(*met(due, {loaded: fp32(*further(2.0))}, loaded, TWO_SAVES)) is None, "no step"


@pytest.mark.parametrize("role", ["param", "exp_avg"])
def test_one_stretch_is_wrong_and_the_rest_right(role: str) -> None:
    key = at(P, role=role)
    said = stretches.part_of_a_step(*stepped((*DUE[:2], 9.0, 8.0, 6.0), key))
    assert said is not None
    assert (
        said.clause
        == f"of {role} of w elements 2 to 4 are wrong after operation 7 (step), and everything else is right"
    )
    assert (said.confidence, said.evidence["ranks"]) == ("likely", [])
    two = stretches.part_of_a_step(*stepped((9.0, 8.0, *DUE[2:]), key))
    assert two is not None
    assert two.confidence == "possible"


def test_the_shares_of_ranks_are_named() -> None:
    difference, given = stepped((9.0, DUE[1], DUE[2], 8.0, 7.0))
    shares = ((0, 0, (9.0,)), (1, 1, DUE[1:3]), (2, 3, (8.0, 7.0)))
    records = tuple(flat(P, rank, start, np.array(part), (5,)) for rank, start, part in shares)
    said = stretches.part_of_a_step(difference, replace(given, records=records))
    assert said is not None
    assert said.clause.startswith("of param of w the share of rank 0 and 2 is wrong")
    assert stretches.part_of_a_step(difference, given) is None, "scattered, and no shares are known"


def test_a_step_that_is_wrong_everywhere_or_for_another_reason() -> None:
    assert stretches.part_of_a_step(*stepped((9.0, 8.0, 7.0, 6.0, 5.0))) is None
    difference, given = stepped((*DUE[:3], 9.0, 8.0))
    wrong = given.observed | {at(P, role="grad"): fp32(1, 3)}
    assert stretches.part_of_a_step(difference, replace(given, observed=wrong)) is None, "the gradient is wrong"
    assert stretches.part_of_a_step(*stepped((*DUE[:3], 9.0, 8.0), at(P, role="norm"))) is None
