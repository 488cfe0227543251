"""The one error a reader raises: a file that is not the checkpoint it claims to be."""

from __future__ import annotations

from collections.abc import Iterable

from harness.errors import UsageError

MAX_QUOTED = 200


class CheckpointError(UsageError):
    """A checkpoint that is missing, truncated, foreign, inconsistent or hostile.

    Bad input (exit status 2) when the user gave the checkpoint; a verdict when a scenario wrote it.
    """


def bad(what: str, given: object, allowed: Iterable[object] | str, form: str) -> CheckpointError:
    """The error to raise, with everything quoted from the file shortened.

    Args:
        what: which file, and what of it. given: what it holds; only text and numbers, never a structure
            out of the file, whose `repr` may not end. allowed, form: see `UsageError.of`.
    """
    if not isinstance(given, str | int | float | bool | None):
        given = type(given).__name__
    return CheckpointError(str(CheckpointError.of(_short(what), _clip(given), allowed, form)))


def _clip(value: str | int | float | None) -> str | int | float | None:
    if isinstance(value, str):
        return _short(value)
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return value


def _short(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED // 2]} … {text[-MAX_QUOTED // 2 :]}"
