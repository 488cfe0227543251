"""Every kept regression still shows its defect on the installed release, and its known issue recognises it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.known_issues import KnownIssues, load_known_issues
from harness.laboratory import Laboratory
from harness.scenario import Scenario
from tests.conformance.patched import needs_clone

SCENARIOS = Path(__file__).parents[2] / "scenarios"
FILES = sorted((SCENARIOS / "regressions").glob("*.toml"))
HANGS = {"torch-fsdp2-empty-tp-hang", "megatron-fsdp-clip-empty-rank"}
QUICK = {
    "automodel": ("automodel-2419-a",),
    "megatron-bridge": (),
    "megatron-fsdp": ("megatron-fsdp-5976", "megatron-fsdp-mixed-unit-scale"),
}
"""Of systems whose packages are large or whose ranks are slow: those that CI runs."""


def is_slow(file: Path) -> bool:
    few = [names for system, names in QUICK.items() if file.stem.startswith(system)]
    return file.stem in HANGS or any(file.stem not in names for names in few)


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=10.0) as opened:
        yield opened


@pytest.fixture(scope="module")
def issues() -> KnownIssues:
    return load_known_issues(SCENARIOS / "known_issues.toml")


@pytest.mark.real
@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=pytest.mark.nightly) if is_slow(f) else f for f in FILES], ids=lambda f: f.stem
)
def test_a_regression_is_seen_confirmed_and_known(file: Path, laboratory: Laboratory, issues: KnownIssues) -> None:
    scenario = Scenario.from_toml(file.read_text(), file.name)
    needs_clone(scenario)
    result = laboratory.examine_one(scenario)
    assert result.verdict.is_failure
    assert result.reproduced
    assert result.reproduced.times == result.reproduced.attempts
    known = issues.match(result)
    assert known is not None, result.signature
    assert any(file.stem.startswith(issue) for issue in known.split("+")), known


def test_every_issue_names_a_regression_and_every_regression_an_issue(issues: KnownIssues) -> None:
    named = {Path(issue.scenario).stem for issue in issues.issues}
    assert named <= {file.stem for file in FILES}
    assert all(any(file.stem.startswith(issue.id) for issue in issues.issues) for file in FILES)
