"""A value that came back from a checkpoint in another type than it was saved in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import copysign

from shardproof.diff import Difference
from shardproof.observe.logical import Value

_TYPES = re.compile(r"dtype (?P<got>\S+) instead of (?P<wanted>[^\s,]+)")
_PLAIN = re.compile(r"['\"](?P<type>\w+) ")

EXACT_TO = {"fp16": "2048", "bf16": "256", "fp32": "16777216"}
"""Up to which integer a type has every one."""


def retyped(difference: Difference) -> str:
    """In which types a value is and should be, with a space in front; empty where they are alike."""
    types = _TYPES.search(difference.detail) if difference.kind == "dtype" else None
    if types is None:
        return ""
    wanted = _name(types["wanted"], difference.expected_first)
    got = _name(types["got"], difference.observed_first)
    if difference.key.role == "step" and types["wanted"] != "utf8" and got in EXACT_TO:
        return f" A count of {got} stops at {EXACT_TO[got]}: look at what casts it to the type of its parameter."
    exact = (
        f", which has whole numbers up to {EXACT_TO[got]} only" if wanted.startswith("int") and got in EXACT_TO else ""
    )
    return f" It is of the type {got}{exact}, and should be of {wanted}." if got != wanted else ""


def same_number(one: Value | None, other: Value | None) -> bool:
    """Whether two plain values are one number to the bit, the one an `int` and the other a `float`."""
    if one is None or other is None or (one.dtype, other.dtype) != ("utf8", "utf8"):
        return False
    texts = dict(value.data.decode().partition(" ")[::2] for value in (one, other))
    if texts.keys() != {"int", "float"}:
        return False
    number = float(texts["float"])
    return int(texts["int"]) == number and (number != 0 or copysign(1.0, number) > 0)


def of_another_type(names: Iterable[str]) -> str:
    """A note on numbers of a schedule, such as an epoch, that came back as a number of another type."""
    return f"equal, and a number of another type: {', '.join(sorted({*names}))}"


def _name(dtype: str, shown: str) -> str:
    """The type of a tensor's elements, or of a plain value, which is recorded as a text with its type in front."""
    plain = _PLAIN.match(shown) if dtype == "utf8" else None
    return plain["type"] if plain else dtype
