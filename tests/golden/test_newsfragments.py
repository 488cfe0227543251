"""Each file of `newsfragments/` has a name and a form that a release can put into `CHANGELOG.md`.

*Does not verify*: that a change has such a file, nor that what it says is true.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "newsfragments"
FRAGMENTS = sorted(path for path in FOLDER.iterdir() if path.name != "README.md")
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\.(feature|bugfix|misc)\.md")
WIDTH = 120
MOST_LINES = 8


def wrong_with(name: str, text: str) -> str:
    """What is wrong with a fragment; empty for nothing."""
    if not NAME.fullmatch(name):
        return "the name is <topic>.<feature|bugfix|misc>.md, a topic in lower case with hyphens"
    lines = text.splitlines()
    if not text.endswith("\n") or not lines or not all(lines):
        return "a paragraph without empty lines, with a line's end behind it"
    if len(lines) > MOST_LINES or max(map(len, lines)) > WIDTH:
        return f"at most {MOST_LINES} lines of {WIDTH} characters"
    if text.startswith(("#", "*", "-")) or not lines[-1].endswith((".", ")", "`")):
        return "whole sentences, without a heading or a bullet"
    return ""


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_a_fragment_is_well_formed(path: Path) -> None:
    assert wrong_with(path.name, path.read_text("utf-8")) == ""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("load-options.feature.md", "An axis.\n", ""),
        ("7468.bugfix.md", "It is right now.\n", ""),
        ("load_options.feature.md", "An axis.\n", "the name is"),
        ("Load.feature.md", "An axis.\n", "the name is"),
        ("load.doc.md", "An axis.\n", "the name is"),
        ("load.feature.rst", "An axis.\n", "the name is"),
        ("load.misc.md", "", "a paragraph"),
        ("load.misc.md", "An axis.", "a paragraph"),
        ("load.misc.md", "An axis.\n\nAnother.\n", "a paragraph"),
        ("load.misc.md", "x" * 121 + ".\n", "at most"),
        ("load.misc.md", "# An axis.\n", "whole sentences"),
        ("load.misc.md", "An axis\n", "whole sentences"),
    ],
)
def test_what_is_wrong_with_a_fragment_is_said(name: str, text: str, said: str) -> None:
    found = wrong_with(name, text)
    assert found.startswith(said)
    assert bool(found) == bool(said)
