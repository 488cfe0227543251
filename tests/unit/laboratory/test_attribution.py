"""What looks like a known defect runs again with that cured, and only then is known.

*Verifies*: every way in which such a run can end, with runs that are made up. *Does not verify*: the cures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from shardproof.issues import cures
from shardproof.issues.known_issues import KnownIssue, KnownIssues, Pattern
from shardproof.laboratory.attribution import MOST_ROUNDS, attributed
from shardproof.program import expand
from shardproof.result import BY_CURE, BY_FACE, BY_RELEASE, IN_PART, Failure, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict
from shardproof.versions import split_cures

SCENARIO = Scenario(system="megatron-core", sharding="zero1", version="0.16.1")
STEP = next(op.index for op in expand(SCENARIO) if op.kind == "step")
HIDDEN = {"3949 behind"}
"""A defect that has a cure and no face."""
FACES = {"2777": "B", "5077": "C", "7449": "D", "1553": "E", "1268": "F", "4046": "G"}
"""Cure, which is the name of a regression too → how its defect looks."""


def issue(name: str, face: str) -> KnownIssue:
    """An entry that any error of that message matches."""
    pattern = Pattern(("step",), (f"E: {face}*",), {})
    return KnownIssue(f"megatron-core-{name}", "", "megatron-core", "", "", "", f"regressions/{name}.toml", pattern)


KNOWN = KnownIssues(
    (*(issue(name, f"face of {face}") for name, face in FACES.items()), issue("fp8-zeros", "without a cure"))
)


def failing(message: str, scenario: Scenario = SCENARIO, **other: object) -> Result:
    error = Failure("E", message, op=STEP)
    result = Result(scenario, scenario.system, scenario.version, Verdict.CRASH, error=error)
    return replace(result, **other)  # type: ignore[arg-type]


def passing(scenario: Scenario) -> Result:
    return Result(scenario, scenario.system, scenario.version, Verdict.PASS)


def library(*defects: str, ends: Verdict = Verdict.PASS) -> Callable[[Scenario], Result]:
    """A library whose defects hide each other: the first that is not cured is what shows."""

    def examine(scenario: Scenario) -> Result:
        asked = split_cures(scenario.version)[1]
        wanted = tuple(HIDDEN | FACES.keys() if asked == "" else (asked or "").split(","))
        left = next((name for name in defects if name not in wanted), None)
        if left is None:
            return replace(passing(scenario), verdict=ends, cured=wanted)
        return failing(left if " " in left else f"face of {FACES[left]}", scenario, cured=wanted)

    return examine


def never(scenario: Scenario) -> Result:
    raise AssertionError(f"{scenario} was run")


def test_nothing_else_is_run_for_what_passes_or_is_new() -> None:
    for result in (passing(SCENARIO), failing("something else")):
        assert attributed(result, KNOWN, never) == (result,)


def test_what_passes_with_its_defect_cured_is_known() -> None:
    (result,) = attributed(failing("face of B"), KNOWN, library("2777"))
    assert (result.known_issue, result.known_by) == ("megatron-core-2777", BY_CURE)
    assert result.standing == "known issue megatron-core-2777"


def test_a_known_defect_behind_another() -> None:
    (result,) = attributed(failing("face of B"), KNOWN, library("2777", "5077"))
    assert (result.known_issue, result.known_by) == ("megatron-core-2777+megatron-core-5077", BY_CURE)


def test_a_known_defect_without_a_face_of_its_own_behind_another() -> None:
    """What the cure of one defect brings to light may be known all the same: nothing is left once all are cured."""
    (result,) = attributed(failing("face of B"), KNOWN, library("2777", "3949 behind"))
    assert (result.known_issue, result.known_by) == ("megatron-core-2777", BY_CURE)


def test_what_comes_and_goes_behind_a_known_defect_is_new() -> None:
    """Even if it does not come while everything is cured: that may be chance."""

    def flaky(scenario: Scenario) -> Result:
        everything = split_cures(scenario.version)[1] == ""
        verdict = Verdict.PASS if everything else Verdict.NONDETERMINISTIC
        return replace(passing(scenario), verdict=verdict, cured=("2777",))

    first, behind = attributed(failing("face of B"), KNOWN, flaky)
    assert (first.known_by, behind.verdict) == (IN_PART, Verdict.NONDETERMINISTIC)


def test_another_defect_with_the_same_face_is_new() -> None:
    first, behind = attributed(failing("face of B"), KNOWN, library("2777", "another one"))
    assert (first.known_issue, first.known_by) == ("megatron-core-2777", IN_PART)
    assert first.standing == "known issue megatron-core-2777 in part: what fails behind it is told apart"
    assert (behind.known_issue, behind.behind) == (None, "megatron-core-2777")
    assert behind.scenario.version == "0.16.1+cured:2777"
    assert behind.standing == "new behind megatron-core-2777"


def test_a_face_that_its_cure_leaves_is_new() -> None:
    """A fault from outside that looks like the defect."""

    def unmoved(scenario: Scenario) -> Result:
        return failing("face of B", scenario, cured=("2777",))

    first, behind = attributed(failing("face of B"), KNOWN, unmoved)
    assert (first.known_by, behind.behind) == (IN_PART, "megatron-core-2777")


def test_what_has_no_cure_is_known_by_face() -> None:
    (result,) = attributed(failing("without a cure"), KNOWN, never)
    assert (result.known_issue, result.known_by) == ("megatron-core-fp8-zeros", BY_FACE)
    assert result.standing == "known issue megatron-core-fp8-zeros, by face only"


def test_what_has_no_cure_behind_what_has_one() -> None:
    (result,) = attributed(failing("face of B"), KNOWN, library("2777", "without a cure"))
    assert (result.known_issue, result.known_by) == ("megatron-core-2777+megatron-core-fp8-zeros", BY_FACE)


def test_a_cure_that_does_not_apply() -> None:
    def uncured(scenario: Scenario) -> Result:
        return failing("face of B", scenario, not_cured={"2777": cures.MOVED})

    (result,) = attributed(failing("face of B"), KNOWN, uncured)
    assert (result.known_issue, result.known_by) == ("megatron-core-2777", BY_FACE)


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.UNSUPPORTED])
def test_a_run_that_tells_nothing(verdict: Verdict) -> None:
    (result,) = attributed(failing("face of B"), KNOWN, library("2777", ends=verdict))
    assert (result.known_issue, result.known_by) == ("megatron-core-2777", BY_FACE)


def test_a_failure_that_comes_and_goes_with_its_cure_is_new() -> None:
    first, behind = attributed(failing("face of B"), KNOWN, library("2777", ends=Verdict.NONDETERMINISTIC))
    assert (first.known_by, behind.verdict) == (IN_PART, Verdict.NONDETERMINISTIC)


def test_on_a_cured_release_only_what_is_not_cured_is_known() -> None:
    scenario = replace(SCENARIO, version="0.16.1+cured:-5077")
    cured = tuple(name for name in FACES if name != "5077")
    assert attributed(failing("face of B", scenario, cured=cured), KNOWN, never)[0].known_issue is None
    (result,) = attributed(failing("face of C", scenario, cured=cured), KNOWN, library(*FACES))
    assert (result.known_issue, result.known_by) == ("megatron-core-5077", BY_CURE)


def test_it_ends() -> None:
    runs = []

    def endless(scenario: Scenario) -> Result:
        runs.append(scenario)
        everything = split_cures(scenario.version)[1] == ""
        return failing("something else", scenario) if everything else library(*FACES)(scenario)

    found = attributed(failing("face of B"), KNOWN, endless)
    assert len(runs) == MOST_ROUNDS + 1
    assert [result.known_by for result in found] == [IN_PART, ""]


def test_more_defects_than_rounds_are_known_if_nothing_is_left_once_all_are_cured() -> None:
    assert len(FACES) > MOST_ROUNDS
    (result,) = attributed(failing("face of B"), KNOWN, library(*FACES))
    assert result.known_by == BY_CURE


class Runs:
    """What was run besides the first time: scenarios with cures, and confirmations."""

    def __init__(self, examine: Callable[[Scenario], Result], *, comes_again: bool = True) -> None:
        self.cured, self.confirmed = 0, 0
        self._examine, self._comes_again = examine, comes_again

    def examine(self, scenario: Scenario) -> Result:
        self.cured += 1
        return self._examine(scenario)

    def confirm(self, result: Result) -> Result:
        self.confirmed += 1
        return result if self._comes_again else replace(result, verdict=Verdict.NONDETERMINISTIC)

    def of(self, message: str) -> tuple[Result, ...]:
        return attributed(failing(message), KNOWN, self.examine, self.confirm)


def test_a_known_failure_costs_one_further_run() -> None:
    runs = Runs(library("2777"))
    assert runs.of("face of B")[0].known_by == BY_CURE
    assert (runs.cured, runs.confirmed) == (1, 0)


@pytest.mark.parametrize("message", ["something else", "without a cure"])
def test_what_no_cure_explains_is_confirmed(message: str) -> None:
    runs = Runs(never)
    (result,) = runs.of(message)
    assert (runs.cured, runs.confirmed) == (0, 1)
    assert result.known_by == (BY_FACE if message == "without a cure" else "")


def test_what_is_new_behind_a_known_failure_is_confirmed_as_that_is() -> None:
    runs = Runs(library("2777", "another one"))
    assert len(runs.of("face of B")) == 2
    assert (runs.cured, runs.confirmed) == (2, 2), "with the one cured and with all; the new failure and the first one"


@pytest.mark.parametrize("message", ["without a cure", "face of B"])
def test_what_comes_and_goes_is_never_known_by_its_face(message: str) -> None:
    runs = Runs(library("2777", "another one"), comes_again=False)
    (result,) = runs.of(message)
    assert (result.verdict, result.known_issue) == (Verdict.NONDETERMINISTIC, None)


OLD = replace(SCENARIO, system="automodel", version="0.4.0", sharding=Scenario().sharding)
REPAIRED = KnownIssues(
    (
        KnownIssue(
            "automodel-x", "", "automodel", "", "", "", "regressions/x.toml", Pattern(("step",), ("E: face*",), {}),
            fixed="0.5.0, by pull request 2419",
        ),
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("there", "known_by"),
    [("", BY_RELEASE), ("face of it", BY_FACE), ("a bit that flipped", IN_PART)],
)
def test_what_no_cure_takes_away_a_later_release_does(there: str, known_by: str) -> None:
    asked = []

    def examine(scenario: Scenario) -> Result:
        asked.append(scenario.version)
        return failing(there, scenario) if there else passing(scenario)

    result, *behind = attributed(failing("face of it", OLD), REPAIRED, examine)
    assert asked == ["0.5.0+cured"]
    assert (result.known_issue, result.known_by) == ("automodel-x", known_by)
    assert [(each.behind, each.version) for each in behind] == [("automodel-x", "0.5.0+cured")] * (known_by == IN_PART)


def test_a_release_that_repaired_it_before_says_nothing() -> None:
    (result,) = attributed(failing("face of it", replace(OLD, version="0.5.0")), REPAIRED, never)
    assert result.known_by == BY_FACE
