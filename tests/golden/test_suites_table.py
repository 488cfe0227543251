"""The table of upstream's suites in docs/emulation.md is what the committed lists say."""

from __future__ import annotations

from pathlib import Path

from docs.written.suites_table import render

PAGE = Path(__file__).parents[2] / "docs/emulation.md"
AGAIN = "put what `python -m docs.written.suites_table` writes between the marks in docs/emulation.md"


def test_the_table_is_what_the_lists_say() -> None:
    text = PAGE.read_text("utf-8")
    shown = text.partition("<!-- python -m docs.written.suites_table -->\n")[2].partition("<!-- end -->")[0]
    assert shown == render(), AGAIN
