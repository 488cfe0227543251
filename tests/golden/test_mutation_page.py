"""The table in docs/mutation.md is what the record of survivors says, and each survivor has its reason there."""

from __future__ import annotations

from tests.survivors import MARKS, PAGE, render

AGAIN = "write it anew: python -m tests.survivors"


def test_the_table_is_what_the_record_says() -> None:
    shown = PAGE.read_text("utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert shown == render(), AGAIN
