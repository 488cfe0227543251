"""The glossary: docs/glossary.md is what its pages say, and has the words that a report's reader meets.

*Verifies*: that the committed page is the one that docs/site/glossary.py writes; that every word for a verdict, a
standing, a kind of difference, a confidence and a state of history is in it, those of ours that reports' headings use,
and every word that the pages of definitions have in italics. *Does not verify*: that a definition is right.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from shardproof.diagnosis.explanation import CONFIDENCES
from shardproof.diff import STRUCTURE
from shardproof.report.history import STATES
from shardproof.verdict import Standing, Verdict

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/glossary.md"
WORDS = set(re.findall(r"^\* \*\*(.+?)\*\*:", PAGE.read_text("utf-8"), re.MULTILINE))

_TEMPLATES = sorted(ROOT.glob("harness/shardproof/report/templates/*.html"))
_HEADING = re.compile(r"<(h[1-4]|th|caption|legend)\b[^>]*>(.*?)</\1>", re.DOTALL)
_CODE = re.compile(r"\{[{%].*?[%}]\}|<[^>]*>|&\w+;", re.DOTALL)

IN_HEADINGS = ("known", "new", "program", "regression", "role", "scenario", "verdict")
"""The words of ours that headings of reports use. Whoever puts another one there adds it."""

OWNERS = ("architecture", "report", "numerics")
"""Pages whose single words in italics are definitions."""

OTHERWISE = {"axes": "axis", "follows": "first to diverge"}
"""What stands in italics there and is in the glossary under another word, or as part of a longer one."""


@pytest.mark.parametrize(
    "word", sorted({*map(str, (v.value for v in (*Verdict, *Standing))), *STRUCTURE, "bits", "norm", "equivalent"})
)
def test_a_word_of_a_result_is_defined(word: str) -> None:
    assert word in WORDS


@pytest.mark.parametrize("word", sorted({*CONFIDENCES, *STATES} - {"not run"}))
def test_a_word_of_a_reader_is_defined(word: str) -> None:
    assert word in WORDS


@pytest.mark.parametrize("word", IN_HEADINGS)
def test_a_word_of_a_heading_is_defined(word: str) -> None:
    headings = [_CODE.sub(" ", text) for path in _TEMPLATES for _, text in _HEADING.findall(path.read_text("utf-8"))]
    assert any(re.search(rf"\b{word}s?\b", text, re.IGNORECASE) for text in headings)
    assert word in WORDS


@pytest.mark.parametrize("name", OWNERS)
def test_every_word_that_a_page_defines_is_listed(name: str) -> None:
    text = (ROOT / f"docs/{name}.md").read_text("utf-8")
    words = {word.lower() for word in re.findall(r"(?<![\w*])\*([\w-]+)\*(?![\w*])", text)}
    listed = {form for word in WORDS for form in (word.lower(), f"{word.lower()}s")}
    assert {OTHERWISE.get(word, word) for word in words} - listed == set()


def test_the_page_is_what_its_sources_say() -> None:
    told = subprocess.run(
        [sys.executable, str(ROOT / "docs/site/glossary.py")], capture_output=True, text=True, check=True
    )
    assert told.stdout == PAGE.read_text("utf-8"), "python docs/site/glossary.py > docs/glossary.md"
