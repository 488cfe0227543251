"""A second defect in the scenario of a known issue is new.

*Verifies*: with real libraries, that a bit which flips in memory, or in what a collective brings, is counted as new
where an entry that nothing but its face can tell already fails.
*Does not verify*: entries that raise. An error ends the scenario, and what lies behind it is not reached.
"""

from __future__ import annotations

import pytest
from shardproof.issues.known_issues import known_issues_of
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.system import System

from tests.conformance.built_in import BUILT_IN
from tests.swallowed import planted, told_by_face

SHOWING_DIFFERENCES = {"megatron-core", "torch-fsdp2", "transformer-engine"}


def test_a_system_with_a_new_entry_by_face_is_planted_in() -> None:
    """An entry whose evidence is no error is told by its values, and its system must be among those below."""
    for system in BUILT_IN:
        for issue in known_issues_of(system):
            values = any("Error" not in text and "Exception" not in text for text in issue.match.evidence)
            if values and not issue.cure and not issue.repaired:
                assert system.name in SHOWING_DIFFERENCES, issue.id
                assert issue.match.params or issue.match.values, f"{issue.id} names neither parameters nor values"


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.parametrize("system", [s for s in BUILT_IN if s.name in SHOWING_DIFFERENCES], ids=lambda s: s.name)
def test_no_entry_swallows_a_planted_fault(system: System) -> None:
    with Laboratory(jobs=3, deadline_s=60) as laboratory:
        found = list(planted(told_by_face(system.name), laboratory))
    assert [each for each in found if each.struck], "no fault struck, so that nothing was shown"
    assert [each for each in found if each.swallowed] == []
