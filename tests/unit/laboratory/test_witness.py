"""On a head a face is believed only where the entry's own scenario shows the same there.

*Verifies*: with runs that are made up, what a scenario of an entry can say, and that each is asked once. *Does not
verify*: that entries' scenarios show their defects; `tests/conformance` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from shardproof.cli.arguments import shipped_issues
from shardproof.diagnosis import Explanation
from shardproof.issues.known_issues import KnownIssue, KnownIssues, Pattern
from shardproof.laboratory.attribution import attributed
from shardproof.laboratory.witness import Witnesses, scenario_of
from shardproof.result import BY_FACE, Failure, Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

HEAD = Scenario(system="megatron-core", sharding="zero1", version="git:main+cured")
RAN = "0.19.1+git.5be9626+cured"
MOVED = {"2777": "the code moved: line 4", "3949": "already repaired there"}


def entry(name: str, face: str = "face*", hidden: bool = False, **axes: tuple[str, ...]) -> KnownIssue:
    pattern = Pattern((), (), {}) if hidden else Pattern(("step",), (f"E: {face}",), axes)
    return KnownIssue(f"megatron-core-{name}", "", "megatron-core", "", "", "", f"regressions/{name}.toml", pattern)


def failing(message: str = "face", mechanism: str = "", scenario: Scenario = HEAD, version: str = RAN) -> Result:
    said = (Explanation(mechanism, "certain", "", (), ()),) if mechanism else ()
    error = Failure("E", message, op=1)
    return Result(
        scenario, "megatron-core", version, Verdict.CRASH, error=error, explanations=said, cured=("1553",),
        not_cured=MOVED,
    )  # fmt: skip


def passing() -> Result:
    return Result(HEAD, "megatron-core", RAN, Verdict.PASS)


def known_as(result: Result, known: KnownIssues, shows: Callable[[KnownIssue], Result]) -> Result:
    (found,) = attributed(result, known, lambda scenario: failing(), witness=lambda issue, _: shows(issue))
    return found


def test_a_face_whose_own_scenario_passes_is_new_and_says_so() -> None:
    found = known_as(failing(), KnownIssues((entry("2777"),)), lambda issue: passing())
    assert found.known_issue is None
    assert found.reason == "it looks like known issue megatron-core-2777, whose own scenario passes here"


def test_a_face_whose_own_scenario_shows_another_mechanism_is_new() -> None:
    known = KnownIssues((entry("2777"),))
    found = known_as(failing(mechanism="zeroed"), known, lambda issue: failing(mechanism="permuted"))
    assert found.known_issue is None
    assert "shows permuted here, and not zeroed" in found.reason


@pytest.mark.parametrize("mechanism", ["", "zeroed"])
def test_a_face_that_its_own_scenario_shows_is_known(mechanism: str) -> None:
    known = KnownIssues((entry("2777"),))
    found = known_as(failing(mechanism="zeroed"), known, lambda issue: failing(mechanism=mechanism))
    assert (found.known_issue, found.known_by) == ("megatron-core-2777", BY_FACE)


def test_another_entry_of_that_face_counts_where_the_first_one_does_not() -> None:
    known = KnownIssues((entry("2777"), entry("plain-no-state")))
    found = known_as(failing(), known, lambda issue: passing() if issue.id.endswith("2777") else failing())
    assert found.known_issue == "megatron-core-plain-no-state"


def test_no_scenario_is_asked_on_a_release_that_was_walked() -> None:
    result = failing(version="0.16.1+cured", scenario=replace(HEAD, version="0.16.1+cured"))

    def never(issue: KnownIssue) -> Result:
        raise AssertionError(issue)

    assert known_as(result, KnownIssues((entry("2777"),)), never).known_by == BY_FACE


def test_an_entry_of_releases_matches_what_the_tree_calls_itself() -> None:
    for pattern, matches in (("0.19.[0-7]", True), ("0.18.*", False)):
        known = KnownIssues((entry("2777", version=(pattern,)),))
        assert bool(known.match(failing())) is matches


@pytest.mark.parametrize(
    ("name", "shows", "known"),
    [
        ("2777", "other", "megatron-core-2777"),  # its cure does not fit this tree
        ("2777", "something else", None),
        ("3949", "other", None),  # repaired there
        ("1553", "other", None),  # cured there
    ],
)
def test_an_entry_that_others_hide_counts_where_its_cure_does_not_apply(
    name: str, shows: str, known: str | None
) -> None:
    hidden = KnownIssues((), (entry(name, hidden=True),))
    found = known_as(failing("other"), hidden, lambda issue: failing(shows))
    assert found.known_issue == known
    assert [issue.id for issue in hidden.entries_named(found.known_issue or "")] == [known] * bool(known)


def test_every_entry_is_asked_once_on_each_library() -> None:
    runs = []

    def examine(scenario: Scenario) -> Result:
        runs.append(scenario)
        return failing(scenario=scenario)

    witness = Witnesses(examine)
    for version in ("git:main+cured", "git:main+cured", "git:other+cured"):
        witness(entry("2777"), failing(scenario=replace(HEAD, version=version)))
    assert [run.version for run in runs] == ["git:main+cured", "git:other+cured"]
    assert runs[0] == replace(scenario_of(entry("2777")), version="git:main+cured")


def test_what_a_run_of_an_entry_raises_reaches_all_who_ask() -> None:
    def examine(scenario: Scenario) -> Result:
        raise OSError("no space")

    witness = Witnesses(examine)
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            witness(entry("2777"), failing())


def test_the_shipped_entries_without_a_face_are_kept_apart_and_have_scenarios() -> None:
    issues = shipped_issues()
    assert issues.hidden
    assert not {issue.id for issue in issues.hidden} & {issue.id for issue in issues.issues}
    assert all(scenario_of(issue).system == issue.system for issue in issues.hidden)
