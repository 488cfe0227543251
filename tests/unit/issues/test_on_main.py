"""What an entry of issues.toml says of upstream's main branch: of one commit, and with a reason where lines differ."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from shardproof.errors import UsageError
from shardproof.issues.on_main import on_main_of
from shardproof.tables import Table

READ = {"commit": "d98e8a64dd", "date": "2026-08-22", "version": "0.20.0", "place": "a/b.py:12", "stands": True}
GONE = READ | {"stands": False, "says": "The loop asks for the class now."}


def entry(content: Mapping[str, object]) -> Table:
    return Table({"on_main": content}, "s/issues.toml: issue 1")


def test_lines_that_stand_are_told_with_their_place() -> None:
    found = on_main_of(entry(READ))
    assert found is not None
    assert found.sentence("0.16.1") == (
        "On the main branch the lines stand unchanged: `a/b.py:12` at commit `d98e8a64dd` of 2026-08-22, which calls "
        "itself 0.20.0 (read, not run)."
    )
    assert "(read, not run)" not in found.sentence(run=True)


def test_lines_that_do_not_stand_are_told_with_what_stands_there() -> None:
    found = on_main_of(entry(GONE))
    assert found is not None
    assert found.sentence("0.21.0") == (
        "On the main branch the lines read otherwise: `a/b.py:12` at commit `d98e8a64dd` of 2026-08-22, which calls "
        "itself 0.20.0 (read, not run). The loop asks for the class now. That commit is older than 0.21.0."
    )


def test_an_entry_may_say_nothing() -> None:
    assert on_main_of(Table({}, "s/issues.toml: issue 1")) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (READ | {"commit": "main"}, r"on_main: commit: given 'main'; allowed: seven hexadecimal digits or more"),
        (READ | {"date": "22 August"}, r"on_main: date: given '22 August'; allowed: a day, ISO 8601"),
        (READ | {"version": "newest"}, r"on_main: version: given 'newest'; allowed: what the tree calls itself"),
        (READ | {"place": "the loop"}, r"on_main: place: given 'the loop'; allowed: a file and a line"),
        (READ | {"stands": "yes"}, r"on_main: stands: given 'yes'; allowed: true or false"),
        (READ | {"says": "no sentence"}, r"on_main: says: given 'no sentence'; allowed: whole sentences"),
        (READ | {"stands": False}, r"on_main: says: given ''; allowed: whole sentences"),
        (READ | {"line": "a/b.py:12"}, r"on_main: key: given 'line'; allowed: commit, date, version, place, stands"),
        ({"commit": "d98e8a64dd"}, r"on_main: keys: .* allowed: date too"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused(content: Mapping[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        on_main_of(entry(content))
