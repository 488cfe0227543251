"""The conformance kit on every system of ours, and on systems that are broken so that a check must say so.

*Verifies*: what ships with shardproof conforms (`reference` and `torch-fsdp2` in CI, the rest nightly, since their
libraries are installed by release); and each check of the kit fails on a system with the mistake that the check is for
(`broken.py`), or in a laboratory that is blind to what was planted.
*Does not verify*: that the kit's checks are all that can go wrong.
"""

from __future__ import annotations

import pytest
from shardproof.checks.conformance import CHECKS, Check, check_system
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.registry import system_named
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

from tests.conformance import broken
from tests.conformance.built_in import BUILT_IN

pytestmark = pytest.mark.real

TABULATES = "every limit and constraint can be tabulated"
UNDECLARED = "an axis value that nobody declared is refused"
PASSES = "the plain scenario passes"
OBSERVING = "observing changes nothing"
FLIPS = "one flipped bit is seen in every role of every rank"
TYPES = "every number of a param group is recorded with its type"
LOADS = "a load that does nothing is seen"
KILLED = "a killed rank is a crash"
MESHES = "two meshes agree"
REFUSALS = "every refusal that is said to be the library's is raised by it"

IN_CI = ("reference", "torch-fsdp2")
"""Systems that need no package of their own: their checks are made in CI."""

QUICK = {UNDECLARED, TABULATES}
"""Checks that start no rank: in CI for all systems."""

AT_NIGHT = ("torch-fsdp2", REFUSALS)
"""A scenario for each of torch's errors. That the check notices a claim that is wrong, CI tries on a broken system."""


def is_slow(system: System, name: str) -> bool:
    """Whether a check waits for the night."""
    return (system.name, name) == AT_NIGHT or not (system.name in IN_CI or name in QUICK)


CASES = [
    pytest.param(system, name, id=f"{system.name}: {name}", marks=[pytest.mark.nightly] * is_slow(system, name))
    for system in BUILT_IN
    for name in CHECKS
]


@pytest.mark.parametrize(("system", "name"), CASES)
def test_a_system_of_ours_conforms(laboratory: Laboratory, system: System, name: str) -> None:
    found = list(check_system(system, laboratory, names=[name]))
    assert found
    assert [check.line for check in found if check.wrong] == []


OTHER_RELEASES = sorted(
    {
        (system.name, limit.error.axes["version"])
        for system in BUILT_IN
        for limit in system.accepts.limits
        if limit.error and "version" in limit.error.axes
    }
)
"""Releases whose refusals are theirs alone."""


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "version"), OTHER_RELEASES)
def test_a_refusal_of_another_release_is_raised_by_it(laboratory: Laboratory, name: str, version: str) -> None:
    system = system_named(name)
    found = list(check_system(system, laboratory, version, [REFUSALS]))
    limits = [limit for limit in system.accepts.limits if limit.error and limit.error.axes.get("version") == version]
    assert found
    assert [check.line for check in found if any(f" {limit.id} says" in check.name for limit in limits)] == []


@pytest.mark.parametrize(
    ("system", "name", "wrong"),
    [
        (broken.UNDECLARED, UNDECLARED, ["sharding=novel is accepted", "dtype param=novel is accepted"]),
        (broken.WIDE, TABULATES, ["rule 'wide-constraint' of broken-wide", "rule 'wide-limit' of broken-wide"]),
        (broken.IDLE_LOAD, PASSES, ["mismatch and not pass, of "]),
        (broken.MEDDLES, OBSERVING, ["observed at the end only, "]),
        (broken.OMITS, FLIPS, ["a difference without any flip could flip unseen"]),
        (broken.BELIEVES, FLIPS, [f"live exp_avg_sq of rank {rank} could flip unseen" for rank in (0, 1)]),
        (broken.UNTYPED, TYPES, [
            *(f"live group0.{key} of rank {r} has no type" for key in ("lr", "betas", "eps") for r in (0, 1)),
            "written group0.",
        ]),
        (broken.PARROT, LOADS, ["pass and not mismatch, of "]),
        (broken.UNEVEN, MESHES, ["1x2x1 and 1x4x1 differ in "]),
        (broken.CLAIMS, REFUSALS, [
            "RuntimeError 'one microbatch' in step was not raised, but nothing",
            "KeyError \"'short'\" in step was not raised, but KeyError in build",
            "no scenario shows it",
            "it does not refuse its own scenario: ",
        ]),
    ],
    ids=lambda value: getattr(value, "name", value) if not isinstance(value, list) else "",
)  # fmt: skip
def test_a_broken_system_is_caught(laboratory: Laboratory, system: System, name: str, wrong: list[str]) -> None:
    found = [check for check in check_system(system, laboratory, names=[name]) if check.wrong]
    lines = [check.line for check in found]
    for text in wrong:
        assert any(check.wrong.startswith(text) for check in found), (text, lines)
    assert not any(line.startswith("ok") for line in lines)


class Blind:
    """A laboratory in which every scenario passes, whatever struck it."""

    def examine_one(self, scenario: Scenario) -> Result:
        return Result(scenario, scenario.system, "", Verdict.PASS)


@pytest.mark.parametrize("name", [LOADS, KILLED])
def test_a_laboratory_that_sees_nothing_is_caught(name: str) -> None:
    (found,) = check_system(broken.SYSTEM, Blind(), names=[name])  # type: ignore[arg-type]
    assert found.wrong.startswith("pass and not ")


def test_a_laboratory_that_takes_a_killed_rank_for_a_stuck_one_is_caught() -> None:
    class Patient(Blind):
        def examine_one(self, scenario: Scenario) -> Result:
            return Result(scenario, scenario.system, "", Verdict.HANG)

    (found,) = check_system(broken.SYSTEM, Patient(), names=[KILLED])  # type: ignore[arg-type]
    assert found.wrong.startswith("hang and not crash")


def test_every_check_has_a_system_or_a_laboratory_that_it_catches() -> None:
    caught = {TABULATES, UNDECLARED, PASSES, OBSERVING, FLIPS, TYPES, LOADS, KILLED, MESHES, REFUSALS}
    assert caught == CHECKS.keys()


def test_a_line_says_what_came_of_a_check() -> None:
    assert Check("it holds").line == "ok    it holds"
    assert Check("it holds", "it does not").line == "FAIL  it holds: it does not"
    assert Check("it holds", skipped="not here").line == "skip  it holds: not here"
