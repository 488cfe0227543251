"""Rules for state beside parameters and optimizer state: random generators, and fp8 weights with their scales.

For example, two expert-parallel ranks have generators with seeds of their own. After a load both have that of rank 0:
their states were taken for copies of one, and one was written.

*Verifies*: bits. A state, a byte or a scale that is recognised is exactly what the mechanism makes of what was due.
*Does not verify*: why.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.explanation import Context, Finding, Floats, Rule, tensor
from shardproof.diff import Difference, as_numbers
from shardproof.observe.logical import Key, Value
from shardproof.observe.record import NUMPY_NAME

F32 = npt.NDArray[np.float32]
LARGEST = np.float32(448)
"""The greatest number of fp8e4m3."""

SCALES = ("quantised", "param")
"""What follows a parameter's name in that of the inverse scale of its weight in fp8."""


def stream_of_another_rank(difference: Difference, context: Context) -> Finding | None:
    """A generator has the state that one of another coordinate must have (MLM-6858)."""
    key, pair = difference.key, context.pair(difference)
    if key.role != "rng" or pair is None:
        return None
    stream, _ = _stream(key)
    wanted, got = _states(pair.expected), _states(pair.observed)
    others = {f"place {index}": state for index, state in enumerate(wanted)} if len(wanted) > 1 else {}
    for other, value in context.siblings(key):
        theirs, place = _stream(other)
        if theirs == stream:
            others.setdefault(place, value.data)
    moved: dict[int, str] = {}
    for index, (due, state) in enumerate(zip(wanted, got, strict=True)):
        if due != state:
            moved[index] = next((name for name, own in others.items() if own == state), "")
    if not moved or not all(moved.values()):
        return None
    whose = ", ".join(dict.fromkeys(moved.values()))
    clause = f"{tensor(key)} after {context.op_name(key.op)} is that of {whose}"
    return Finding("certain", clause, {"name": key.fqn, "from": list(moved.values())})


def _stream(key: Key) -> tuple[str, str]:
    """Which stream a generator is of, and whose: a rank's or, where a checkpoint names each coordinate's, a place's."""
    rank, _, stream = key.fqn.partition(".")
    base, _, number = stream.rpartition(".")
    return (base, f"place {number}") if base and number.isdigit() else (stream, rank)


def _states(value: Value) -> list[bytes]:
    """The states that a value holds: one a row, or one alone."""
    count = value.shape[0] if len(value.shape) > 1 else 1
    size = len(value.data) // count
    return [value.data[at : at + size] for at in range(0, len(value.data), size)]


def scale_of_a_part(difference: Difference, context: Context) -> Finding | None:
    """The scales of a weight in fp8 are those of its parts: each is 448 over the greatest magnitude of the elements
    that have it (TE-2713g)."""
    key, pair = difference.key, context.pair(difference)
    name, _, what = key.fqn.rpartition(".")
    if key.role != "quant_scale" or what not in SCALES or pair is None:
        return None
    source = _stepped(key._replace(fqn=name), context)
    inverse = as_numbers(pair.observed).astype(np.float32)
    values = np.unique(inverse)
    if source is None or source.size != inverse.size or len(values) < 2:
        return None
    parts = [np.abs(source[inverse == value]).max() for value in values]
    if any(np.float32(1) / _scale(amax) != value for amax, value in zip(parts, values, strict=True)):
        return None
    clause = (
        f"{tensor(key)} has {len(values)} scales after {context.op_name(key.op)}, each of the elements that have it"
    )
    return Finding("certain", clause, {"name": name, "greatest": [float(amax) for amax in parts]})


def quantised_twice(difference: Difference, context: Context) -> Finding | None:
    """A weight in fp8, or its scale, is what its own values make when they are quantised again (MLM-6666, TE-2974)."""
    key, pair = difference.key, context.pair(difference)
    name, _, what = key.fqn.rpartition(".")
    of_scale = key.role == "quant_scale" and what == SCALES[0]
    if pair is None or not (of_scale or key.role == "quantised"):
        return None
    fqn = name if of_scale else key.fqn
    data = context.expected.get(key._replace(role="quantised", fqn=fqn))
    inverse = context.expected.get(key._replace(role="quant_scale", fqn=f"{fqn}.{SCALES[0]}"))
    if data is None or inverse is None:
        return None
    read = as_numbers(data).astype(np.float32) * as_numbers(inverse).astype(np.float32)
    for dtype in ("bf16", "fp16", "fp32"):
        through = read.astype(NUMPY_NAME[dtype]).astype(np.float32)
        scale = _scale(np.abs(through).max())
        again = np.clip(through * scale, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
        made = np.full(read.shape, np.float32(1) / scale) if of_scale else again
        if made.tobytes() == pair.observed.data:
            clause = f"{tensor(key)} after {context.op_name(key.op)} is made of what the weight stands for in {dtype}"
            return Finding("certain", clause, {"name": fqn, "through": dtype})
    return None


def _stepped(key: Key, context: Context) -> Floats | F32 | None:
    """What the optimizer steps on of a parameter, as it must be."""
    for role in ("master", "param"):
        value = context.expected.get(Key(key.op, "live", role, key.fqn))
        if value is not None:
            return as_numbers(value).astype(np.float32)
    return None


def _scale(amax: np.floating) -> np.float32:
    return LARGEST / np.float32(amax) if 0 < amax < np.inf else np.float32(1)


RULES = (
    Rule(
        "stream_of_another_rank", "A rank draws from the stream of another one", stream_of_another_rank, ("MLM-6858",)
    ),
    Rule("scale_of_a_part", "The scale of a weight is taken over a part of it", scale_of_a_part, ("TE-2713g",)),
    Rule("quantised_twice", "Weights were quantised again", quantised_twice, ("MLM-6666", "TE-2974")),
)
