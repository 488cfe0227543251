"""docs/findings.md is what `python -m harness.report.findings` writes, and says of every defect what a reader needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.report.findings import Finding, Section, render, section_of
from harness.systems.registry import all_systems

ROOT = Path(__file__).parents[2]
SECTIONS = [section_of(system) for system in all_systems()]
FINDINGS = [finding for section in SECTIONS for finding in section.findings]
AGAIN = "write it anew: python -m harness.report.findings > docs/findings.md"


def test_the_page_is_what_the_entries_say() -> None:
    assert (ROOT / "docs/findings.md").read_text("utf-8") == render(SECTIONS), AGAIN


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.id)
def test_a_finding_says_what_a_reader_needs(finding: Finding) -> None:
    assert finding.severity
    assert 0 < len(finding.harm) <= 140, f"{finding.id}: harm = one plain sentence on what a user has in the end"
    assert finding.reach, f"{finding.id}: reach = how a run comes to meet it"
    folder = ROOT / "tests/conformance" / finding.system.replace("-", "_") / "patches"
    assert [name for name in finding.patches if not (folder / f"{name}.patch").is_file()] == []


def test_every_patch_belongs_to_a_finding() -> None:
    folders = (ROOT / "tests/conformance").glob("*/patches/*.patch")
    kept = {(file.parts[-3].replace("_", "-"), file.stem) for file in folders}
    named = {(finding.system, patch) for finding in FINDINGS for patch in finding.patches}
    assert sorted(kept - named) == [("megatron-core", "4423-gdn")]  # told of in 4423, whose patch is another file's


def test_a_cause_that_is_no_finding_is_an_error() -> None:
    orphan = next(finding for finding in FINDINGS if finding.cause)
    section = next(section for section in SECTIONS if orphan in section.findings)
    alone = Section(section.system, "", (type(section.parts[0])("", "", (orphan,)),))
    with pytest.raises(UsageError, match=orphan.cause):
        render([alone])
