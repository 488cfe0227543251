"""Bit patterns for a reader: which bits are sign, exponent and mantissa, and what the pattern means where a number does
not say it: a NaN's payload, the sign of a zero, a subnormal.

The failure page does the same in its own script for any element that is clicked (`templates/failure.js`); this is for
the first element that differs, on a page without script and on a terminal.
"""

from __future__ import annotations

from typing import NamedTuple

from shardproof.observe.record import ITEMSIZE


class Format(NamedTuple):
    """How many bits a float has of each part. infinite: whether all ones in the exponent mean infinity or NaN; without,
    only the pattern of all ones is a NaN, and nothing is infinite."""

    exponent: int
    mantissa: int
    infinite: bool = True


FORMATS = {
    "fp64": Format(11, 52), "fp32": Format(8, 23), "fp16": Format(5, 10), "bf16": Format(8, 7),
    "fp8e4m3": Format(4, 3, infinite=False), "fp8e5m2": Format(5, 2),
}  # fmt: skip


class Part(NamedTuple):
    """Bits that belong together. name: `sign`, `exponent`, `mantissa`, or `bits` of what is no float."""

    name: str
    digits: str


def parts_of(dtype: str, pattern: int) -> tuple[Part, ...]:
    """A pattern cut into its parts, the highest bit first."""
    digits = f"{pattern:0{8 * ITEMSIZE[dtype]}b}"
    form = FORMATS.get(dtype)
    if form is None:
        return (Part("bits", digits),)
    end = 1 + form.exponent
    return (Part("sign", digits[0]), Part("exponent", digits[1:end]), Part("mantissa", digits[end:]))


def meaning_of(dtype: str, pattern: int) -> str:
    """What a number alone does not say of a pattern; empty where it says everything."""
    form = FORMATS.get(dtype)
    if form is None:
        return ""
    sign, exponent, mantissa = (int(part.digits, 2) for part in parts_of(dtype, pattern))
    full = (1 << form.exponent) - 1
    if exponent == full and (form.infinite or mantissa == (1 << form.mantissa) - 1):
        if form.infinite and not mantissa:
            return "minus infinity" if sign else "infinity"
        if not form.infinite:
            return "NaN"
        quiet = mantissa >> (form.mantissa - 1)
        payload = mantissa & ((1 << (form.mantissa - 1)) - 1)
        return f"{'quiet' if quiet else 'signalling'} NaN, payload {payload:#x}"
    if not exponent:
        return "subnormal" if mantissa else "negative zero" if sign else "zero"
    return ""


def differing(expected: int, observed: int) -> str:
    """Which bits differ between two patterns, for a sentence: `1 bit`, `bits 0 to 22`."""
    where = [at for at in range((expected ^ observed).bit_length()) if (expected ^ observed) >> at & 1]
    if len(where) == 1:
        return f"bit {where[0]} differs"
    return f"{len(where)} bits differ, the highest is {where[-1]}" if where else "no bit differs"
