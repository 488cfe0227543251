"""The errors a reader raises: a file is not the checkpoint it claims to be, or has a form that nobody here knows.

The difference decides whose failure it is. A truncated file is what the library wrote, on any release. A file that is
whole and of another form may be what a new commit of the library writes on purpose, and then it is our reader that does
not fit (`shardproof.laboratory.misfits`).
"""

from __future__ import annotations

from collections.abc import Iterable

from shardproof.errors import UsageError

MAX_QUOTED = 200

WHOLE = "an earlier checkpoint, or this one saved again"
"""What a user does about a checkpoint that is damaged or cut off."""


class CheckpointError(UsageError):
    """A checkpoint that is missing, truncated, foreign, inconsistent or hostile.

    Bad input (exit status 2) when the user gave the checkpoint; a verdict when a scenario wrote it.
    """


class UnfamiliarError(CheckpointError):
    """A checkpoint that may be sound, in a form that the reader does not know: a file that it asks for is not there, a
    key has a place that it has never seen."""


def unfamiliar(what: str, given: object, allowed: Iterable[object] | str, form: str) -> UnfamiliarError:
    """The error to raise where a form is unknown; its arguments are those of `bad`."""
    return UnfamiliarError(str(bad(what, given, allowed, form)))


def bad(what: str, given: object, allowed: Iterable[object] | str, form: str) -> CheckpointError:
    """The error to raise, with everything quoted from the file shortened.

    Args:
        what: which file, and what of it. given: what it holds; only text and numbers, never a structure
            out of the file, whose `repr` may not end. allowed, form: see `UsageError.of`.
    """
    if not isinstance(given, str | int | float | bool | None):
        given = type(given).__name__
    choices = allowed if isinstance(allowed, str) else ", ".join(map(str, allowed))  # a file mistypes nothing
    return CheckpointError(str(CheckpointError.of(_short(what), _clip(given), choices, form)))


def _clip(value: str | int | float | None) -> str | int | float | None:
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return value


def _short(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED // 2]} … {text[-MAX_QUOTED // 2 :]}"
