"""A fault that is planted beside a known defect does not end as known: on real ranks.

*Verifies*: every boundary fault, in the scenario that shows each known issue. The failure is attributed as a walk does
it, with the fault in the cured runs too. What a cure turns green had no fault in it that shows; anything else must not
be known, unless the defect alone looks exactly the same: then it ended the run before the fault could strike. A hang
that nobody expects is looked at once more, with patience, so that a busy machine does not pass for a new failure.
*Does not verify*: faults at other places of the entries' axes. tests/unit/faults/test_faults_and_known_issues.py plays
the decision for every entry without ranks.

Only an entry without a cure can take a fault for itself: it goes by the face alone. So at night each of those meets
every fault. An entry with a cure is asked again on the cured library, with the fault; each meets one fault, in
turn, so that every fault meets some of them. `SHARDPROOF_EFFORT=3` has each meet three, and a number as large as there
are faults makes it the whole product, three thousand cases and two hours of processor time. In CI a few run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
from shardproof.faults.boundary import BOUNDARY
from shardproof.issues.known_issues import KnownIssue, KnownIssues, known_issues_of
from shardproof.laboratory.attribution import attributed
from shardproof.laboratory.laboratory import Laboratory
from shardproof.result import BY_CURE, BY_RELEASE, IN_PART, Result
from shardproof.scenario import Mesh, Scenario
from shardproof.space.files import load_space
from shardproof.verdict import Verdict

from tests.conformance.built_in import BUILT_IN
from tests.conformance.regression_scenarios import needs_clone
from tests.effort import examples

KNOWN = {system.name: KnownIssues(known_issues_of(system)) for system in BUILT_IN}
STUCK_S, PATIENT_S = 10.0, 60.0
"""What a session may take before it counts as stuck, as some faults and some defects make it; and before that is
believed of a scenario where neither is to be expected. A busy machine looks the same, and would be no known issue."""

STUCK = "boundary.stuck-rank"

IN_CI = {
    ("torch-fsdp2-186998-silent", "boundary.lost-contribution"),
    ("torch-fsdp2-164929", "boundary.flip-bit"),
}
"""The first is one of the two that were measured to be swallowed; the other has a face that is met often."""


def _marks(issue: KnownIssue, fault: str) -> list[pytest.MarkDecorator]:
    """In as many processes as there are: each issue has servers of its own, with its cure."""
    in_ci = (issue.id, fault) in IN_CI
    return [pytest.mark.xdist_group(issue.id), *[pytest.mark.nightly] * (not in_ci)]


def faults_beside(issue: KnownIssue, turn: int) -> list[str]:
    """The faults that an entry meets: all where it has no cure, else those whose turn it is, and what CI runs."""
    faults = list(BOUNDARY)
    drawn = {faults[(turn + at) % len(faults)] for at in range(examples(1))} if issue.cure else set(faults)
    return [fault for fault in faults if fault in drawn or (issue.id, fault) in IN_CI]


CASES = [
    pytest.param(issue, fault, id=f"{issue.id}-{fault}", marks=_marks(issue, fault))
    for known in KNOWN.values()
    for turn, issue in enumerate(known.issues)
    for fault in faults_beside(issue, turn)
]


@pytest.fixture(scope="module")
def hasty() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=STUCK_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def patient() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=PATIENT_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def unfaulted(hasty: Laboratory) -> Callable[[Scenario], tuple[Result, ...]]:
    """What a walk says of an entry's scenario without a fault: asked up to nine times, run once."""
    return cache(partial(judged, laboratory=hasty))


def shown_by(issue: KnownIssue) -> Scenario:
    name = issue.scenario.removesuffix(".toml").replace("regressions/", f"regressions/{issue.system}-")
    scenario: Scenario = load_space(name).scenarios[0]
    needs_clone(scenario)
    return scenario


def judged(scenario: Scenario, laboratory: Laboratory) -> tuple[Result, ...]:
    """What a walk would say of the scenario itself, and of what lies behind; but that no failure is repeated: one that
    did not come again would not be known, so that this is the harder question."""
    once = partial(laboratory.examine_one, confirm=False)
    return attributed(once(scenario), KNOWN[scenario.system], once)


def hangs_unexpectedly(results: tuple[Result, ...]) -> bool:
    return any(result.verdict is Verdict.HANG and not result.known_issue for result in results)


def same_face(one: Result, other: Result) -> bool:
    return (one.evidence, one.signature, len(one.differences)) == (
        other.evidence,
        other.signature,
        len(other.differences),
    )


@pytest.mark.real
@pytest.mark.parametrize(("issue", "fault"), CASES)
def test_a_fault_beside_a_known_issue_is_not_known(
    issue: KnownIssue,
    fault: str,
    hasty: Laboratory,
    unfaulted: Callable[[Scenario], tuple[Result, ...]],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    scenario = shown_by(issue)
    faulty = replace(scenario, faults=(fault,))
    results = judged(faulty, hasty)
    if fault != STUCK and hangs_unexpectedly(results):
        results = judged(faulty, request.getfixturevalue("patient"))
    found = results[0]
    record_property("ended", f"known by {found.known_by}" if found.known_by else "new")
    record_property("signature", found.signature or found.verdict.value)
    assert found.verdict is not Verdict.UNKNOWN, found.reason
    if found.known_by in ("", BY_CURE, BY_RELEASE, IN_PART):
        return
    alone = unfaulted(scenario)[0]
    assert same_face(found, alone), f"{fault} is taken for {found.known_issue}: {found.signature}"


@pytest.mark.real
def test_a_bit_that_is_flipped_on_disk_is_no_uneven_strided_shard(hasty: Laboratory) -> None:
    """Measured once: a model and a mesh where every split is even, and the failure was known as 161368."""
    scenario = Scenario("torch-fsdp2", mesh=Mesh(1, 2, 2), program="build step save build load")
    assert not judged(scenario, hasty)[0].verdict.is_failure
    found = judged(replace(scenario, faults=("boundary.flip-bit",)), hasty)[0]
    assert found.verdict.is_failure
    assert not found.known_issue
