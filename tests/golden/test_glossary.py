"""The glossary: docs/glossary.md is what its pages say, and has the words that a report's reader meets.

*Verifies*: that the committed page is the one that docs/site/glossary.py writes; that every word for a verdict, a
standing, a kind of difference, a confidence and a state of history is in it; that every word of a heading of a report
is in it, is one of the field, or is plain English, by the lists below. *Does not verify*: that a definition is right.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.diagnosis.explanation import CONFIDENCES
from harness.diff import STRUCTURE
from harness.report.history import STATES
from harness.verdict import Standing, Verdict

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/glossary.md"
WORDS = set(re.findall(r"^\* \*\*(.+?)\*\*:", PAGE.read_text("utf-8"), re.MULTILINE))

_TEMPLATES = sorted(ROOT.glob("harness/report/templates/*.html"))
_HEADING = re.compile(r"<(h[1-4]|th|caption|legend)\b[^>]*>(.*?)</\1>", re.DOTALL)
_CODE = re.compile(r"\{[{%].*?[%}]\}|<[^>]*>|&\w+;", re.DOTALL)

FIELD = {"issues", "mesh", "operation", "release", "releases", "toml"}
"""Words that every reader of such a report knows, or that name a file."""

PLAIN = """
a above against all and apart as at b besides both by calls came combinations combined command compared
contradicts could covered defect defects difference differences differs do does each element entries equal
error events excluded expected explore fail fails failures filters first folder for found from happened here
history holds it judge known leave library longer maintainers matrix named names new nights no not observed of
oldest on once one operations other otherwise page planned program public ran reason results role roles run s
says scenario scenarios see seen set shardproof short showed side sides since state states sweeps that the
these this timing to together told training until values verdicts was went were what when where which with
without you your yourself
"""


@pytest.mark.parametrize(
    "word", sorted({*map(str, (v.value for v in (*Verdict, *Standing))), *STRUCTURE, "bits", "norm", "equivalent"})
)
def test_a_word_of_a_result_is_defined(word: str) -> None:
    assert word in WORDS


@pytest.mark.parametrize("word", sorted({*CONFIDENCES, *STATES} - {"not run"}))
def test_a_word_of_a_reader_is_defined(word: str) -> None:
    assert word in WORDS


@pytest.mark.parametrize("template", _TEMPLATES, ids=lambda path: path.stem)
def test_a_heading_has_no_word_that_nobody_explains(template: Path) -> None:
    headings = [_CODE.sub(" ", text) for _, text in _HEADING.findall(template.read_text("utf-8"))]
    words = {word.lower() for text in headings for word in re.findall(r"[A-Za-z_]+", text)}
    ours = {form for word in WORDS for form in (word.lower(), f"{word.lower()}s")}
    assert words - ours - FIELD - set(PLAIN.split()) == set()


def test_the_page_is_what_its_sources_say() -> None:
    told = subprocess.run(
        [sys.executable, str(ROOT / "docs/site/glossary.py")], capture_output=True, text=True, check=True
    )
    assert told.stdout == PAGE.read_text("utf-8"), "python docs/site/glossary.py > docs/glossary.md"
