"""Reads the numbers of a param group, such as `lr`, even if a library left a wrong type there.

What a load lost is left out, and so is what is no number any more: both show as missing. An observation that raised
instead would hide a finding of the library's behind an error of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NAMES = ("lr", "weight_decay", "eps", "momentum", "nesterov")
"""Besides the betas, the numbers that the conventions name."""


def numbers_of(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Name → number, betas as `beta1` and `beta2`; what is absent, or no number, is left out."""
    betas = group.get("betas", ())
    pairs = enumerate(betas, 1) if isinstance(betas, (tuple, list)) else ()
    for name, value in (*((name, group.get(name)) for name in NAMES), *((f"beta{n}", beta) for n, beta in pairs)):
        number = number_of(value)
        if number is not None:
            yield name, number


def number_of(value: Any) -> float | None:
    """A value as a python float; None where it is text, nothing, or a tensor of several elements."""
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
