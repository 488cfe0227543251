"""docs/resilience.md and docs/resilience/ are what `python -m docs.written.resilience_table` writes, and the
scripts of its findings stand alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from shardproof.resilience.page import page_of
from shardproof.resilience.stacks import STACKS, stacks_of

from docs.written.pages import differing
from docs.written.resilience_rows import stack_rows, struck_rows
from docs.written.resilience_table import render
from tests.conformance.built_in import BUILT_IN

ROOT = Path(__file__).parents[2]
DOCUMENT = stack_rows()
FINDINGS = tomllib.loads((ROOT / "docs/resilience-findings.toml").read_text("utf-8"))
STRUCK = struck_rows()
LONGEST_SCRIPT = 60


def test_the_pages_are_what_was_tried() -> None:
    written = render(DOCUMENT, FINDINGS, STRUCK)
    assert differing(written) == [], "write them anew: python -m docs.written.resilience_table"


def test_each_row_stands_in_the_data_of_its_system() -> None:
    own = {stack.name for stack in STACKS}
    house = {row["name"] for row in tomllib.loads((ROOT / "docs/resilience.toml").read_text("utf-8"))["stack"]}
    assert house == own
    for system in BUILT_IN:
        file = ROOT / "scenarios" / system.name / "resilience/stacks.toml"
        rows = tomllib.loads(file.read_text("utf-8"))["stack"] if file.is_file() else []
        names = {stack.name for stack in stacks_of(system)}
        assert {row["name"].partition("+")[0] for row in rows} == names


def test_the_reference_is_the_example() -> None:
    (own,) = (stack for stack in DOCUMENT["stack"] if stack["name"] == "reference")
    outcomes = {outcome for cells in own["kind"].values() for outcome in cells}
    assert outcomes <= {"old", "new", "other", "error"}
    assert {"old", "new"} >= set(own["kind"]["killed"])


def test_scripts_of_findings_are_short_and_import_nothing_of_ours() -> None:
    scripts = sorted((ROOT / "docs/resilience-scripts").glob("*.py"))
    assert [path.name for path in scripts] == sorted(finding["script"] for finding in FINDINGS["finding"])
    for path in scripts:
        text = path.read_text("utf-8")
        assert text.count("\n") <= LONGEST_SCRIPT
        assert not re.search(r"^\s*(from|import) (shardproof|tests)\b", text, re.MULTILINE)
    said = re.compile(r"Public: |Not found public on \d{4}-\d\d-\d\d; searched")
    assert all(said.match(finding["public"]) for finding in FINDINGS["finding"])


def test_the_report_page_has_every_stack_and_loads_nothing() -> None:
    page = page_of({**DOCUMENT, "seed": 0})
    assert all(f'id="{stack["name"]}"' in page for stack in DOCUMENT["stack"])
    assert not re.search(r'(?:src|href)="(?!#)', page)
