"""The quality of shrinking: what it must make of known defects, from big scenarios that nobody chose.

*Verifies*: for each defect of the tables (`tests/shrunk.py`), that its start fails with the recorded signature, that
shrinking ends in time at the recorded scenario with no more attempts than recorded (and a tenth), that the result fails
with the same signature, and that shrinking it again changes nothing. Over all defects, that half of them need two axes
or fewer that are not at a default. *Does not verify*: that nothing simpler fails anywhere; a result with more than two
axes has, for the most part, a signature that names what they bring: masters need a dtype and a sharding that have them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import pytest
from shardproof.investigate.shrink import needed, weight
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.registry import system_named

from tests.conformance.built_in import BUILT_IN
from tests.shrunk import BIG, LIMIT_S, Case, cases, laboratory_of, shrunk

CASES = cases(BUILT_IN)
IN_CI = {"initialising-save", "padding-kept", "groups-lost", "stale-buffer-binding", "stale-masters"}


def _lockstep(case: Case) -> bool:
    return system_named(case.start.system).world == "lockstep"


@pytest.fixture(scope="module")
def laboratories() -> Iterator[dict[str, Laboratory]]:
    """One laboratory at a time: a system's defects come one after the other."""
    there: dict[str, Laboratory] = {}
    yield there
    for laboratory in there.values():
        laboratory.__exit__(None, None, None)


def _only(there: dict[str, Laboratory], system: str) -> Laboratory:
    for name in there.keys() - {system}:
        there.pop(name).__exit__(None, None, None)
    if system not in there:
        there[system] = laboratory_of(system_named(system)).__enter__()
    return there[system]


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    if not _lockstep(case):
        return [pytest.mark.real, pytest.mark.nightly]
    return [] if case.defect in IN_CI else [pytest.mark.nightly]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.defect, marks=_marks(case)) for case in CASES])
def test_a_defect_is_shrunk_to_what_it_needs(case: Case, laboratories: dict[str, Laboratory]) -> None:
    laboratory = _only(laboratories, case.start.system)
    first = laboratory.examine_one(case.start)
    assert first.signature == case.signature
    began = time.monotonic()
    found = shrunk(first, laboratory)
    took_s = time.monotonic() - began
    assert (found.result.scenario, found.result.signature) == (case.least, case.signature)
    assert found.complete
    assert found.tried <= 1.1 * case.tried
    assert took_s <= LIMIT_S[_lockstep(case)]
    again = shrunk(found.result, laboratory)
    assert (again.result.scenario, again.complete) == (case.least, True)


def test_half_of_thirty_defects_need_two_axes_or_fewer() -> None:
    assert len(CASES) >= 30
    assert sum(not _lockstep(case) for case in CASES) >= 12
    assert median(len(case.axes) for case in CASES) <= 2


def test_every_start_is_big_and_every_result_simpler() -> None:
    for case in CASES:
        assert len(needed(case.start)) >= BIG, case.defect
        assert weight(case.least) < weight(case.start), case.defect
        assert case.tried > 0


def test_what_runs_in_ci_is_there() -> None:
    assert {case.defect for case in CASES if _lockstep(case)} >= IN_CI
