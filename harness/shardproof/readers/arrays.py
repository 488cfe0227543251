"""Reads a pickled numpy array as data, without unpickling it.

numpy has an array rebuilt by a call and filled by a state; here neither is executed. What the pickle says is taken only
if it is exactly what numpy writes of an array of plain numbers: a dtype of a fixed list in little endian, a shape, rows
in order, and as many bytes as these two make. For example, `numpy.random.get_state()` holds an array of 624 uint32.

*Verifies*: that. *Does not verify*: what the numbers mean.
"""

from __future__ import annotations

from math import prod

from shardproof.readers.symbolic import Name, Node

RECONSTRUCT = tuple(Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core"))
"""Before numpy 2, and since."""

NDARRAY, DTYPE = Name("numpy", "ndarray"), Name("numpy", "dtype")

BYTES = Name("_codecs", "encode")
"""How protocol 2 writes bytes: text that is encoded as latin1."""

NO_BYTES = Name("__builtin__", "bytes")
"""How it writes none: a call without arguments."""

PLAIN = {
    "b1": "bool", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64",
}  # fmt: skip
"""numpy's code of a dtype, whose last digit is the bytes of a number → its name."""

MAX_DIMS = 32

Array = tuple[str, tuple[int, ...], bytes]
"""The name of a dtype, a shape, and the numbers, row-major, little endian."""


def array_of(node: object) -> Array | None:
    """The array that a part of a parsed pickle is; None if it is none, or not one of plain numbers."""
    match node:
        case Node(
            function=function,
            args=(Name() as kind, (0,), start),
            state=(1, tuple(shape), dtype, False, content),
            pairs=[],
            items=[],
        ) if function in RECONSTRUCT and kind == NDARRAY and bytes_of(start) == b"b":
            code, data = _code_of(dtype), bytes_of(content)
            if code is None or data is None or not _is_shape(shape) or len(data) != prod(shape) * int(code[-1]):
                return None
            return PLAIN[code], shape, data
    return None


def bytes_of(node: object) -> bytes | None:
    """Bytes as protocols 2 and later write them; None if they are none."""
    match node:
        case bytes():
            return node
        case Node(function=function, args=(str(text), "latin1"), state=None, pairs=[], items=[]) if function == BYTES:
            try:
                return text.encode("latin1")
            except UnicodeEncodeError:
                return None
        case Node(function=function, args=(), state=None, pairs=[], items=[]) if function == NO_BYTES:
            return b""
    return None


def _code_of(node: object) -> str | None:
    """The code of a plain dtype; None of any other."""
    match node:
        case Node(
            function=function,
            args=(str(code), False, True),
            state=(3, "<" | "|", None, None, None, -1, -1, 0),
            pairs=[],
            items=[],
        ) if function == DTYPE and code in PLAIN:
            return code
    return None


def _is_shape(shape: tuple[object, ...]) -> bool:
    return len(shape) <= MAX_DIMS and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
