"""Finds mechanisms that act on each element alone, such as rounding, scaling or zeroing, by what all differing elements
have in common.

Each is a hypothesis that begins alive and dies at the first element that it does not explain, so that tensors of any
size are looked at in one pass. For example, a tensor that was saved through bf16 has, at every element that differs,
the other side's number rounded to bf16.

*Verifies*: an explanation holds for every element that differs, bit for bit. *Does not verify*: that it is the only
one.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.compare.dtypes import is_float, itemsize, numbers, numpy_of

NARROWER = {"fp64": ("fp32", "fp16", "bf16"), "fp32": ("fp16", "bf16"), "fp16": ("fp8e4m3", "fp8e5m2"),
            "bf16": ("fp8e4m3", "fp8e5m2")}  # fmt: skip

SIMPLE = 4096
"""The largest denominator of a factor that is looked for: a number of ranks, of microbatches, a loss scale."""

ENOUGH = 3
"""So many different elements must agree before a factor or a rounding is believed."""

Raw = npt.NDArray[Any]


class Patterns:
    """The hypotheses about one tensor."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.float = is_float(dtype)
        self.count = 0
        self.distinct: set[bytes] = set()
        names = ["a zero", "b zero", "a nan", "b nan", "sign", "payload", "mask"]
        self.alive = dict.fromkeys(names if self.float else ["a zero", "b zero", "mask"], True)
        self.mask = 0
        self.factor: Fraction | None = None
        self.first = (0.0, 0.0)
        if self.float:
            for name in NARROWER.get(dtype, ()):
                self.alive |= {f"b through {name}": True, f"a through {name}": True}
            self.alive["factor"] = True

    def add(self, a: Raw, b: Raw) -> None:
        """Look at elements that differ, as bits of both sides."""
        if a.dtype.kind != "u":
            self.alive = {}
            return
        first = not self.count
        self.count += len(a)
        if len(self.distinct) < ENOUGH:
            self.distinct |= {one.tobytes() for one in np.unique(b[:4096])[:ENOUGH]}
        mask = np.bitwise_or.reduce(a ^ b)
        if first:
            self.mask = int((a ^ b)[0])
        self.alive["mask"] &= bool(self.mask == mask == np.bitwise_and.reduce(a ^ b))
        for side, bits, other in (("a", a, b), ("b", b, a)):
            magnitude = other << 1 if self.float else other  # without the sign: the two zeros are no such pair
            self.alive[f"{side} zero"] &= not bits.any() and bool(magnitude.all())
        if self.float:
            self._add_floats(a, b, first=first)

    def _add_floats(self, a: Raw, b: Raw, *, first: bool) -> None:
        x, y = numbers(a, self.dtype), numbers(b, self.dtype)
        sign = a.dtype.type(1 << (itemsize(self.dtype) * 8 - 1))
        with np.errstate(all="ignore"):
            nan_a, nan_b = np.isnan(x), np.isnan(y)
            self.alive["a nan"] &= bool((nan_a & ~nan_b).all())
            self.alive["b nan"] &= bool((nan_b & ~nan_a).all())
            self.alive["payload"] &= bool((nan_a & nan_b).all())
            self.alive["sign"] &= bool(((a ^ b) == sign).all())
            for name in NARROWER.get(self.dtype, ()):
                self._through(f"b through {name}", name, x, b)
                self._through(f"a through {name}", name, y, a)
            if self.alive["factor"]:
                if first:
                    self.factor, self.first = _factor(x, y), (float(x[0]), float(y[0]))
                self.alive["factor"] = self.factor is not None and _scaled(x, b, self.factor, self.dtype)

    def _through(self, key: str, name: str, numbers_: Raw, other: Raw) -> None:
        if self.alive[key]:
            rounded = numbers_.astype(numpy_of(name)).astype(numpy_of(self.dtype))
            self.alive[key] = bool((rounded.view(other.dtype) == other).all())

    def explanation(self, total: int, *, counts: bool = False) -> tuple[str, str]:
        """`(mechanism, sentence)`; empty texts if nothing explains all elements that differ.

        Args:
            total: elements of the tensor. counts: it is a counter, such as an optimizer's `step`, whose values have a
                distance and no factor.
        """
        if counts and total == self.count == 1 and self.float and all(one.is_integer() for one in self.first):
            more = int(self.first[1] - self.first[0])
            return "counted", f"B is {abs(more)} {'more' if more > 0 else 'less'} than A."
        hypothesis = self._strongest_hypothesis(total) if self.count else None
        if hypothesis is None:
            return "", ""
        mechanism, text = hypothesis
        where = "" if self.count == total else "Where they differ, "
        return mechanism, f"{where}{text}." if where else f"{text[0].upper()}{text[1:]}."

    def _strongest_hypothesis(self, total: int) -> tuple[str, str] | None:
        """The first hypothesis that is still alive, the most telling first, and how it is said."""
        alive = {name for name, yes in self.alive.items() if yes}
        for side, other in (("A", "B"), ("B", "A")):
            if f"{side.lower()} zero" in alive:
                return "zeroed", f"{side} is zero and {other} is not"
            if f"{side.lower()} nan" in alive:
                return "nan", f"{side} is NaN and {other} is a number"
        if "payload" in alive:
            return "nan_payload", "both are NaN, with other payloads"
        if "sign" in alive:
            return "sign", "the signs are opposite"
        many = len(self.distinct) >= min(ENOUGH, total)
        if "mask" in alive:
            if plain := self._plain_factor(total):
                return "scaled", f"B is A times {_render_factor(plain)}"
            if self.mask.bit_count() == 1 or (many and self.count >= ENOUGH):
                return "bit_flip", f"{_places(self.mask)} flipped"
        if not many:
            return None
        for name in NARROWER.get(self.dtype, ()) if self.float else ():
            for side, other in (("B", "A"), ("A", "B")):
                if f"{side.lower()} through {name}" in alive:
                    return "narrowed", f"{side} is {other} rounded to {name}"
        if "factor" in alive and self.factor is not None:
            return "scaled", f"B is A times {_render_factor(self.factor)}"
        return None

    def _plain_factor(self, total: int) -> Fraction | None:
        """The whole number, or one part of one, that says better what is wrong than the bits that are flipped; None if
        nothing does.

        Every change of a constant tensor flips the same bits in all elements, such as eight from 1 to 2. A single bit,
        the lowest of the exponent, may be flipped in a memory, and is a factor only where several numbers agree.
        """
        if not self.alive.get("factor") or self.factor is None:
            return None
        plain = 1 in (abs(self.factor.numerator), self.factor.denominator)
        several = self.mask.bit_count() > 1 or len(self.distinct) >= ENOUGH
        return self.factor if plain and several and self.count >= min(ENOUGH, total) else None


def _factor(x: Raw, y: Raw) -> Fraction | None:
    """A simple factor from the largest number of one side to that of the other; None if there is none."""
    wide, other = x.astype(np.float64), y.astype(np.float64)
    usable = np.isfinite(wide) & np.isfinite(other) & (wide != 0) & (other != 0)
    if not usable.any():
        return None
    at = int(np.argmax(np.where(usable, np.abs(wide), 0)))
    ratio = float(other[at] / wide[at])
    if not np.isfinite(ratio) or ratio == 0:
        return None
    exact = Fraction(ratio)
    if abs(exact.numerator).bit_count() == exact.denominator.bit_count() == 1:
        return exact
    small = min(exact, 1 / exact, key=abs).limit_denominator(SIMPLE)
    return None if not small else small if abs(exact) < 1 else 1 / small


def _scaled(x: Raw, b: Raw, factor: Fraction, dtype: str) -> bool:
    """Whether every number times the factor, rounded once, has the other side's bits."""
    wide, whole = x.astype(np.float64), float(factor)
    exact = Fraction(whole) == factor  # a power of two may be 2 ** -1024, whose denominator is no double
    product = wide * whole if exact else wide * float(factor.numerator) / float(factor.denominator)
    return bool((product.astype(numpy_of(dtype)).view(b.dtype) == b).all()) and factor != 1


def _render_factor(factor: Fraction) -> str:
    text = str(factor)
    return text if factor.denominator == 1 or len(text) > 12 else f"{text} ({float(factor):.6g})"


def _places(mask: int) -> str:
    places = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    if len(places) == 1:
        return f"bit {places[0]} is"
    return f"bits {', '.join(map(str, places[:8]))}{', …' if len(places) > 8 else ''} are"
