"""Canaries of the differ: pairs of values that a tolerant comparison would call equal, and that must be reported as
different.

Every CI run makes these comparisons; one that finds no difference, or one of another kind, fails the run.
"""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np

from shardproof.diff import diff
from shardproof.observe.logical import Key, Value

KEY = Key(0, "live", "exp_avg", "a.weight")


def fp32(*numbers: float, shape: tuple[int, ...] | None = None) -> Value:
    """An fp32 value of these numbers, one-dimensional unless a shape is given."""
    return Value("fp32", (len(numbers),) if shape is None else shape, np.array(numbers, np.float32).tobytes())


def bits(dtype: str, *patterns: int) -> Value:
    """A one-dimensional value of these bit patterns."""
    code = {"fp64": "Q", "fp32": "I", "fp16": "H", "bf16": "H"}[dtype]
    return Value(dtype, (len(patterns),), struct.pack(f"<{len(patterns)}{code}", *patterns))


BF16_ONE = Value("bf16", (1,), np.array([1.0]).astype(ml_dtypes.bfloat16).tobytes())

PAIRS: dict[str, tuple[Value, Value, str]] = {
    "shape (1,) against (4,)": (fp32(1.0), fp32(1.0, 1.0, 1.0, 1.0), "shape"),
    "shape () against (1,)": (fp32(1.0, shape=()), fp32(1.0), "shape"),
    "shape (2, 3) against (3, 2), same bytes": (fp32(*range(6), shape=(2, 3)), fp32(*range(6), shape=(3, 2)), "shape"),
    "fp32 against bf16 of equal value": (fp32(1.0), BF16_ONE, "dtype"),
    "fp32 against int32 of equal bits": (fp32(1.0), Value("int32", (1,), fp32(1.0).data), "dtype"),
    "fp16 against bf16 of equal bits": (bits("fp16", 0x3C00), bits("bf16", 0x3C00), "dtype"),
    "+0 against -0": (fp32(0.0), fp32(-0.0), "bits"),
    "empty against [1.0]": (fp32(), fp32(1.0), "shape"),
    "NaN payloads, fp32": (bits("fp32", 0x7FC00000), bits("fp32", 0x7FC00001), "bits"),
    "NaN payloads, bf16": (bits("bf16", 0x7FC0), bits("bf16", 0x7FC1), "bits"),
    "NaN signs": (bits("fp64", 0x7FF8 << 48), bits("fp64", 0xFFF8 << 48), "bits"),
    "quiet against signalling NaN": (bits("fp32", 0x7FC00001), bits("fp32", 0x7F800001), "bits"),
    "one ULP": (fp32(1.0), bits("fp32", 0x3F800001), "bits"),
    "smallest subnormal against 0": (fp32(0.0), bits("fp32", 1), "bits"),
    "largest finite against infinity": (bits("fp32", 0x7F7FFFFF), bits("fp32", 0x7F800000), "bits"),
}
"""Name → (expected, observed, the kind of difference that must be found)."""


def found_kind(expected: Value, observed: Value) -> str:
    """The kind of the one difference between two values of the same name; empty if the differ finds none."""
    # something else to compare: a comparison of nothing but an empty value is refused
    ballast = {KEY._replace(role="param"): fp32(1.0)}
    found = diff({**ballast, KEY: expected}, {**ballast, KEY: observed})
    return found[0].kind if len(found) == 1 and found[0].fails else ""
