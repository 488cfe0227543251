"""The errors a user can cause, each naming what was given, what is allowed and the correct form."""

from __future__ import annotations

from collections.abc import Iterable

MOST_GIVEN = 300
"""Characters of what was given that an error repeats; of something longer, the beginning."""
MOST_OF_A_LINE = 4000


class UsageError(Exception):
    """Bad input from the user: exit status 2, nothing lost."""

    @classmethod
    def of(cls, what: str, given: object, allowed: Iterable[object] | str, form: str) -> UsageError:
        """Build the three-part message: given, allowed, correct form.

        Args:
            what: the thing that is wrong, e.g. ``"axis 'dtype'"``.
            given: the value received.
            allowed: the values that would do, or a description of them.
            form: one correct example, as the user would write it.
        """
        choices = allowed if isinstance(allowed, str) else ", ".join(str(a) for a in allowed)
        return cls(f"{what}: given {_told(given)}; allowed: {choices}; for example: {form}")


def printable(text: str, most: int = MOST_OF_A_LINE) -> str:
    """A text for a terminal: characters that it would obey, or could not show, are escaped, and lines without end cut.

    Names of files and arguments come from anywhere; line breaks are ours.

    Args:
        most: characters of a line that are kept.
    """
    return "\n".join(_line(line, most) for line in text.split("\n"))


def _line(text: str, most: int) -> str:
    if len(text) > most:
        text = f"{text[:most]}… ({len(text)} characters)"
    return "".join(c if c.isprintable() or c == "\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def _told(given: object) -> str:
    """What was given, as code, as far as an error repeats it."""
    try:
        text = repr(given)
    except (ValueError, RecursionError):  # a number of thousands of digits; tables in tables without end
        return f"a {type(given).__name__} too large to print"
    return text if len(text) <= MOST_GIVEN else f"{text[:MOST_GIVEN]}… ({len(text)} characters)"


class HarnessError(Exception):
    """shardproof itself failed: the verdict is `unknown`, the exit status 3."""


class ServerLostError(HarnessError):
    """A process of ours was killed or ended: a server, a supervisor, a worker. It says nothing about what ran in it,
    and is tried a second time."""
