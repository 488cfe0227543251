"""Strict rules for numbers and documents from outside: which texts are accepted, before anything is made of them.

Python is generous: it takes `1_000`, the digits of every script, and `nan`, and reads integers of any length from TOML,
which it then refuses to print. Each would be a second text for a value, or an error in an unexpected place.
"""

from __future__ import annotations

import re
from typing import Any

from shardproof.errors import UsageError

MOST_NESTED = 20
"""How deep tables and lists may lie in each other; ours need six."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,400}\.?[0-9]{0,400}|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")


def number(text: str, to: type) -> int | float:
    """The number that a text says in the digits 0 to 9. `-0.0` is 0.0: scenarios that are equal have the same values,
    bit for bit, so that what is worked out for one may serve the other.

    Args:
        to: int, of up to 19 digits, or float.

    Raises:
        ValueError: it says none.
    """
    if not (_WHOLE if to is int else _DECIMAL).fullmatch(text):
        raise ValueError(f"no number: {text[:40]!r}")
    return int(text) if to is int else float(text) + 0.0


def require_plain(value: object, depth: int = 0) -> None:
    """Check that nothing in a document is so large or so deep that showing it fails.

    Raises:
        ValueError: an integer of more than 64 bits, which no other reader of TOML has to take either.
        RecursionError: tables or lists in each other, too deep.
    """
    if depth > MOST_NESTED:
        raise RecursionError
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer of more than 64 bits")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            require_plain(item, depth + 1)


def typed(what: str, text: str, to: type) -> Any:
    """The boolean, number or string that a text says.

    Raises:
        UsageError: it says none. `what` is its name in the message.
    """
    try:
        if to is bool:
            return {"true": True, "false": False}[text]
        return number(text, to) if to in (int, float) else to(text)
    except (KeyError, ValueError):
        raise UsageError.of(what, text, f"a value of type {to.__name__}", f"{what.split()[-1]}=1") from None


def words(text: str) -> tuple[str, ...]:
    """The words of a text such as `overlap+precision_aware`, in order; none for `none`, or an empty text."""
    return () if text == "none" else tuple(sorted(part for part in text.split("+") if part))


def assignments(what: str, parts: list[str], allowed: tuple[str, ...], form: str) -> dict[str, str]:
    """Name → value of parts such as `master=fp32`, each name once.

    Args:
        what: the policy that they belong to, such as `dtype`. form: what is right, such as `fp32/param=bf16`.

    Raises:
        UsageError: a part has no `=`, a name that is not allowed, or one that was there before.
    """
    options: dict[str, str] = {}
    for part in parts:
        name, separator, value = part.partition("=")
        if not separator or name not in allowed or name in options:
            raise UsageError.of(f"{what} option", part, [f"{a}=…" for a in allowed], form)
        options[name] = value
    return options
