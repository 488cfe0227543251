"""Each defect sits where its cure says: the plain release fails, the cured one passes, and one with every cure but that
fails.

*Verifies*: every cure, on every scenario of its defect, with the real library; in CI one cure. That all
cures of a system stand together on its newest release. *Does not verify*: that a cure is how upstream should repair it.
The founding bug of TransformerEngine is cured in its storage half only: the layers' own forward would have to take the
local tensors too.
"""

from __future__ import annotations

import pytest
from shardproof.investigate.cure_table import APPLIES, applicability, scenario_of, three_ways
from shardproof.issues import cures
from shardproof.issues.cures import Cure
from shardproof.issues.known_issues import known_issues_of
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.releases import package_of
from shardproof.protocol.system import System

from tests.conformance.built_in import BUILT_IN
from tests.conformance.regression_scenarios import HANGS, needs_clone

pytestmark = pytest.mark.real

IN_CI = {("torch-fsdp2", "full-stateless")}
UNRELEASED = {("megatron-fsdp", "hybrid-no-overlap")} | {
    ("megatron-core", each) for each in ("4423-gdn", "fsdp-reduce-fp32", "group-key-rates", "hybrid-stale-masters")
}
"""Cures of code that no release on the package index has."""

CURED = [system for system in BUILT_IN if cures.cures_of(system)]
CASES = [
    pytest.param(
        system, cure, id=f"{system.name}-{cure.id}",
        marks=[pytest.mark.xdist_group(system.name), *[pytest.mark.nightly] * ((system.name, cure.id) not in IN_CI)],
    )
    for system in CURED
    for cure in cures.cures_of(system)
]  # fmt: skip


@pytest.mark.parametrize(("system", "cure"), CASES)
def test_a_cure_is_shown_three_ways(system: System, cure: Cure, request: pytest.FixtureRequest) -> None:
    for name in cure.shown_by:
        needs_clone(scenario_of(system, name))
    hangs = any((system.name, name) in HANGS for name in cure.shown_by)
    laboratory: Laboratory = request.getfixturevalue("hasty" if hangs else "laboratory")
    wrong = [shown.line for shown in three_ways(system, cure, laboratory) if shown.wrong]
    assert wrong == []


@pytest.mark.parametrize(
    "system",
    [pytest.param(s, id=s.name, marks=[pytest.mark.nightly] * (s.name not in dict(IN_CI))) for s in CURED],
)
def test_all_cures_stand_together_on_the_newest_release(system: System) -> None:
    """But for those of defects that a release has repaired."""
    newest = "" if system.is_torch else package_of(system).newest.version  # of torch, the one that is installed
    found = applicability(system, [newest], None)
    repaired = {
        (system.name, known.id.removeprefix(f"{system.name}-")) for known in known_issues_of(system) if known.fixed
    }
    left = {(system.name, cure) for (cure, _), told in found.items() if told != APPLIES}
    assert left <= UNRELEASED | repaired, {cure: found[cure, newest] for _, cure in left - UNRELEASED - repaired}
