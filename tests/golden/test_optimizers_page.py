"""docs/optimizers.md is what `python -m docs.written.optimizer_table` writes; the scripts of its findings stand
alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from shardproof.optimizers.answers import QUESTIONS

from docs.written.optimizer_table import CELLS, MEANS, SHORT, render

ROOT = Path(__file__).parents[2]
DOCUMENT = tomllib.loads((ROOT / "docs/optimizers.toml").read_text("utf-8"))
SCRIPTS = sorted((ROOT / "docs/optimizer-scripts").glob("*.py"))
LONGEST_SCRIPT = 60


def test_the_page_is_what_was_answered() -> None:
    written = (ROOT / "docs/optimizers.md").read_text("utf-8")
    assert written == render(DOCUMENT), "write it anew: python -m docs.written.optimizer_table > docs/optimizers.md"


def test_every_question_has_a_column_and_every_answer_a_cell() -> None:
    assert list(SHORT) == list(MEANS) == list(QUESTIONS)
    for entry in DOCUMENT["optimizer"]:
        if "answers" in entry:
            assert list(entry["answers"]) == list(QUESTIONS)
            assert set(entry["answers"].values()) <= CELLS.keys()
            assert all(entry["why"].get(name) for name, said in entry["answers"].items() if said != "yes")


def test_every_finding_has_a_script_and_says_whether_it_is_public() -> None:
    findings = DOCUMENT["finding"]
    assert [path.name for path in SCRIPTS] == sorted(finding["script"] for finding in findings)
    assert all(re.match(r"Public: |Not found public on \d{4}-\d\d-\d\d; searched", f["public"]) for f in findings)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_imports_nothing_of_ours(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.count("\n") <= LONGEST_SCRIPT
    assert not re.search(r"^\s*(from|import) (shardproof|tests)\b", text, re.MULTILINE)
