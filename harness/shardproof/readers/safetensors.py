"""Shards of a model as safetensors, as torch's distributed checkpoint writes them for Hugging Face.

A file is a length, a JSON header and bytes. The header's metadata (`DCP_SHARDING_INFO`) say at which offsets of the
whole tensor each piece begins, but no file has the whole tensor's shape: the caller has to say it.

*Verifies*: the header is one, every piece lies inside the file and has the bytes that its dtype and shape ask for, and
no two share bytes.
*Does not verify*: the index file, bytes between pieces.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from shardproof.observe.record import ITEMSIZE
from shardproof.readers.errors import CheckpointError, bad, unfamiliar
from shardproof.readers.pieces import TensorPiece

FORM = "shard-00001-model-00001-of-00001.safetensors"
DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "I64": "int64", "BOOL": "bool", "F64": "fp64", "U8": "uint8"}
MAX_HEADER_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 26


def sharded_pieces(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[TensorPiece]:
    """Every tensor's pieces in the shards of a folder; the rank of a piece is the one whose file it lies in.

    Args:
        shapes: of the whole tensors. A tensor that is not named there is taken to be as large as its piece.

    Raises:
        CheckpointError: there is no shard, or one is truncated or not what its header says.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise unfamiliar(f"{folder}: files", "none", "shards of safetensors", FORM)
    for file in files:
        match = re.match(r"shard-(\d{1,6})-", file.name)
        yield from _file(file, max(int(match[1]) - 1, 0) if match else 0, shapes)


def _file(file: Path, rank: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[TensorPiece]:
    if file.is_symlink() or not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
        raise bad(f"{file}: file", "a link, or too large", f"a file of at most {MAX_FILE_BYTES} bytes", FORM)
    header, body = _split(file.read_bytes(), str(file))
    origin, end = str(file), 0
    try:
        metadata = header.pop("__metadata__", {})
        places = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        for fqn, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, size = DTYPES[entry["dtype"]], _counts(entry["shape"])
            first, last = _counts(entry["data_offsets"])
            start = _counts(places.get(fqn, {}).get("saved_offsets", [0] * len(size)))
            if first < end or last > len(body) or last - first != prod(size) * ITEMSIZE[dtype]:
                raise bad(f"{origin}: bytes of {fqn!r}", f"{first} to {last}", "its own, inside the file", FORM)
            end = last
            yield TensorPiece(("model", fqn), rank, dtype, shapes.get(fqn, size), start, size, body[first:last])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise bad(f"{origin}: header", type(error).__name__, "a header of safetensors", FORM) from None


def _counts(values: object) -> tuple[int, ...]:
    """Whole numbers from 0, as they are."""
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"not a list of counts: {values!r:.100}")
    return tuple(values)


def _split(data: bytes, origin: str) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else MAX_HEADER_BYTES + 1
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise bad(f"{origin}: header", "truncated", "its length, then as many bytes of JSON", FORM)
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        raise bad(f"{origin}: header", "no JSON", "its length, then as many bytes of JSON", FORM) from None
    if not isinstance(header, dict):
        raise bad(f"{origin}: header", type(header).__name__, "a JSON object", FORM)
    return header, data[8 + length :]
