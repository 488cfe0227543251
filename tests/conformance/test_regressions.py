"""Every kept regression of every system still shows its defect on its release, and its known issue recognises it."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.system import System

from tests.conformance.built_in import BUILT_IN
from tests.conformance.regression_scenarios import HANGS, needs_clone, regression

QUICK = {
    "automodel": ("2419-a",),
    "deepspeed": ("resting-3", "scale-growth", "universal-empty-part"),
    "megatron-bridge": (),
    "megatron-core": (
        "1268",
        "1553",
        "2777",
        "2777-swap",
        "3949",
        "4423",
        "4423-gdn",
        "dp-reshardable-step",
        "fsdp-plain-state",
        "hybrid-sharded",
        "sgd-sharded",
    ),
    "megatron-fsdp": ("mixed-unit-scale",),
    "transformer-engine": (
        "164929",
        "2713",
        "2713-transformer",
        "capturable-groups",
        "fp32-master",
        "fp8-uneven",
        "scaled-load",
        "tags-offset",
    ),
}
"""Of systems with large packages, slow ranks or many regressions: those that CI runs. Nightly runs all."""


def regressions_of(system: System) -> list[str]:
    """The names of a system's regressions."""
    folder = system.folder.joinpath("regressions")
    return sorted(PurePath(file.name).stem for file in folder.iterdir()) if folder.is_dir() else []


def is_slow(system: str, name: str) -> bool:
    return (system, name) in HANGS or name not in QUICK.get(system, (name,))


CASES = [
    pytest.param(system, name, id=f"{system.name}-{name}", marks=[pytest.mark.nightly] * is_slow(system.name, name))
    for system in BUILT_IN
    for name in regressions_of(system)
]


@pytest.mark.real
@pytest.mark.parametrize(("system", "name"), CASES)
def test_a_regression_is_seen_confirmed_and_known(system: System, name: str, request: pytest.FixtureRequest) -> None:
    scenario = regression(system, name)
    needs_clone(scenario)
    laboratory: Laboratory = request.getfixturevalue("hasty" if (system.name, name) in HANGS else "laboratory")
    result = laboratory.examine_one(scenario)
    assert result.verdict.is_failure, result.reason or result.verdict.value
    assert result.reproduced
    assert result.reproduced.times == result.reproduced.attempts, result.reason
    known = KnownIssues(known_issues_of(system)).match(result)
    assert known is not None, result.signature
    assert any(f"{system.name}-{name}".startswith(issue) for issue in known.split("+")), known


@pytest.mark.parametrize("system", BUILT_IN, ids=lambda system: system.name)
def test_every_issue_names_a_regression_and_every_regression_an_issue(system: System) -> None:
    issues = known_issues_of(system)
    assert all(system.folder.joinpath(issue.scenario).is_file() for issue in issues)
    named = {PurePath(issue.scenario).stem for issue in issues}
    kept = regressions_of(system)
    assert named <= {*kept}
    assert [name for name in kept if not any(f"{system.name}-{name}".startswith(issue.id) for issue in issues)] == []
