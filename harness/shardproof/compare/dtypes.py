"""The dtypes that can occur in foreign checkpoints, such as complex and unsigned integers, with our short names for
them. Scenarios use only a part of these."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shardproof.readers.values import STORAGE_DTYPE, TORCH_DTYPE, Bounds

_NUMPY: dict[str, Any] = {
    "fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16,
    "fp8e4m3": ml_dtypes.float8_e4m3fn, "fp8e5m2": ml_dtypes.float8_e5m2, "fp8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "fp8e8m0": ml_dtypes.float8_e8m0fnu,
    "int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8,
    "uint64": np.uint64, "uint32": np.uint32, "uint16": np.uint16, "uint8": np.uint8, "bool": np.bool_,
    "complex64": np.complex64, "complex128": np.complex128,
}  # fmt: skip

SIGNED_FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16", "fp8e4m3", "fp8e5m2"})
"""Formats of sign, exponent and mantissa, whose bit patterns order like their numbers."""

SAFETENSORS = {
    "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8e4m3", "F8_E5M2": "fp8e5m2",
    "F8_E8M0": "fp8e8m0", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip

_FURTHER = {
    "float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2", "float8_e4m3fnuz": "fp8e4m3fnuz",
    "float8_e5m2fnuz": "fp8e5m2fnuz", "float8_e8m0fnu": "fp8e8m0", "int8": "int8", "uint16": "uint16",
    "uint32": "uint32", "uint64": "uint64", "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip

WIDE = Bounds(
    pickle_bytes=64 << 20,
    values=4_000_000,
    storages={
        **STORAGE_DTYPE, "CharStorage": "int8", "ComplexFloatStorage": "complex64",
        "ComplexDoubleStorage": "complex128", "QInt8Storage": "int8", "QUInt8Storage": "uint8",
        "QInt32Storage": "int32",
    },
    dtypes={**TORCH_DTYPE, **_FURTHER},
)  # fmt: skip
"""What is taken of a checkpoint of any size. A pickle of 64 MiB describes some hundred thousand shards, and takes a few
GB while it is looked at."""

BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def numpy_of(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of one of ours."""
    found: np.dtype[Any] = np.dtype(_NUMPY[dtype])
    return found


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return numpy_of(dtype).itemsize


def raw_of(dtype: str) -> np.dtype[Any]:
    """A numpy dtype that moves the bits of an element unchanged."""
    size = itemsize(dtype)
    return np.dtype(BITS[size]) if size in BITS else np.dtype(f"V{size}")


def is_float(dtype: str) -> bool:
    """Whether the dtype's elements are real floating-point numbers with a sign."""
    return dtype in SIGNED_FLOATS


def numbers(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Elements as numbers, from their bits."""
    return raw.view(numpy_of(dtype))


def shown(raw: npt.NDArray[Any], dtype: str) -> str:
    """One element, shape (1,), as a number and its bits: `1.5 (0x3fc00000)`."""
    bits = raw.tobytes()[::-1].hex()
    value = numbers(raw, dtype)[0]
    if is_float(dtype):
        digits = {"fp64": 17, "fp32": 9}.get(dtype, 6)
        return f"{float(value):.{digits}g} (0x{bits})"
    return f"{value} (0x{bits})" if dtype.startswith("complex") or dtype == "fp8e8m0" else str(value)
