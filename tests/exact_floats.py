"""IEEE arithmetic from exact rationals: one rounding an operation, in any binary format. Slow, and shares no code.

Values are python floats, which hold every value of the formats below. NaN, infinities and signed zeros follow IEEE 754;
NaN payloads are not represented.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

ROOT_BITS = 400
"""Bits of a square root before it is rounded: whether more follow is one bit after them."""


@dataclass(frozen=True)
class Format:
    """A binary format. precision: significand bits. lowest, highest: exponents of normal values. top: where conversions
    saturate; None where they overflow to infinity."""

    precision: int
    lowest: int
    highest: int
    top: float | None = None


FP64 = Format(53, -1022, 1023)
FP32 = Format(24, -126, 127)
BF16 = Format(8, -126, 127)
FP16 = Format(11, -14, 15)
FP8_E4M3 = Format(4, -6, 8, 448.0)


def nearest(value: Fraction, to: Format) -> float:
    """The nearest value of a format, ties to even; zero is positive."""
    magnitude = abs(value)
    if not magnitude:
        return 0.0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, to.lowest) - to.precision + 1)
    rounded = round(magnitude / quantum) * quantum  # python rounds a half to even
    limit = Fraction(to.top) if to.top is not None else Fraction(2) ** (to.highest + 1)
    if rounded >= limit:
        return math.copysign(math.inf if to.top is None else to.top, value)
    return math.copysign(float(rounded), value)


def convert(x: float, to: Format) -> float:
    """`x` in another format."""
    if math.isnan(x) or x == 0:
        return x
    if math.isinf(x):
        return x if to.top is None else math.copysign(to.top, x)
    return nearest(Fraction(x), to)


def add(x: float, y: float, to: Format = FP32) -> float:
    """`x + y`."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return x + y
    exact = Fraction(x) + Fraction(y)
    return nearest(exact, to) if exact else x + y  # where it is zero, python's sum has its sign


def sub(x: float, y: float, to: Format = FP32) -> float:
    """`x - y`."""
    return add(x, -y, to)


def mul(x: float, y: float, to: Format = FP32) -> float:
    """`x * y`."""
    if not (math.isfinite(x) and math.isfinite(y)):
        return x * y
    return math.copysign(nearest(abs(Fraction(x) * Fraction(y)), to), math.copysign(1, x) * math.copysign(1, y))


def div(x: float, y: float, to: Format = FP32) -> float:
    """`x / y`."""
    sign = math.copysign(1, x) * math.copysign(1, y)
    if math.isnan(x) or math.isnan(y) or (x == 0 and y == 0) or (math.isinf(x) and math.isinf(y)):
        return math.nan
    if math.isinf(x) or y == 0:
        return math.copysign(math.inf, sign)
    if math.isinf(y):
        return math.copysign(0.0, sign)
    return math.copysign(nearest(abs(Fraction(x) / Fraction(y)), to), sign)


def sqrt(x: float, to: Format = FP32) -> float:
    """The square root of `x`."""
    if math.isnan(x) or x < 0:
        return math.nan
    if x == 0 or math.isinf(x):
        return x
    exact = Fraction(x)
    scaled = (exact.numerator << 2 * ROOT_BITS) // exact.denominator
    root = math.isqrt(scaled)
    whole = root * root == scaled and scaled * exact.denominator == exact.numerator << 2 * ROOT_BITS
    return nearest(Fraction(2 * root + (not whole), 2 << ROOT_BITS), to)


def power(base: float, exponent: int, to: Format = FP64) -> float:
    """`base ** exponent`, rounded once."""
    return nearest(Fraction(base) ** exponent, to)
