"""The reader of sharded safetensors, on files made here byte by byte.

*Verifies*: pieces, their boxes and whole shapes; damage is refused. *Does not verify*: that a library writes such files
(tests/conformance/test_automodel.py does).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from shardproof.readers.errors import CheckpointError
from shardproof.readers.safetensors import sharded_pieces

pytestmark = pytest.mark.usefixtures("refused_word_for_word")

NAME = "shard-00002-model-00001-of-00001.safetensors"


def write(folder: Path, header: Any, body: bytes, name: str = NAME) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + body)


def entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_a_piece_has_its_box_its_rank_and_the_whole_shape(tmp_path: Path) -> None:
    places = json.dumps({"a": {"saved_offsets": [1, 0]}})
    header = {"a": entry("BF16", [1, 2], 0, 4), "__metadata__": {"DCP_SHARDING_INFO": places}}
    write(tmp_path, header, b"abcd")
    (piece,) = sharded_pieces(tmp_path, {"a": (2, 2)})
    assert (piece.path, piece.rank, piece.dtype) == (("model", "a"), 1, "bf16")
    assert (piece.shape, piece.start, piece.size, piece.data) == ((2, 2), (1, 0), (1, 2), b"abcd")


def test_a_tensor_that_nobody_expects_is_as_large_as_its_piece(tmp_path: Path) -> None:
    write(tmp_path, {"b": entry("F32", [], 0, 4)}, b"abcd", "model.safetensors")
    (piece,) = sharded_pieces(tmp_path, {})
    assert (piece.shape, piece.start, piece.rank) == ((), (), 0)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"a": entry("F32", [2], 0, 4)}, b"abcd"),
        ({"a": entry("F32", [1], 4, 8)}, b"abcd"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"abcdef"),
        ({"a": entry("F7", [1], 0, 4)}, b"abcd"),
        ({"a": {"dtype": "F32"}}, b""),
        ({"a": entry("F32", [float("inf")], 0, 4)}, b"abcd"),
        ({"a": entry("F32", [-1, -1], 0, 4)}, b"abcd"),
        ({"a": entry("F32", [1.9], 0, 4)}, b"abcd"),
        ({"a": entry("F32", "1", 0, 4)}, b"abcd"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "[" * 100_000}, "a": entry("F32", [1], 0, 4)}, b"abcd"),
        ([1], b""),
        (b"{", b""),
    ],
    ids=[
        "too short",
        "outside",
        "shared",
        "unknown dtype",
        "no shape",
        "endless",
        "negative",
        "a fraction",
        "a text",
        "deep",
        "no object",
        "no JSON",
    ],
)
def test_damage_is_refused(tmp_path: Path, header: Any, body: bytes) -> None:
    write(tmp_path, header, body)
    with pytest.raises(CheckpointError):
        list(sharded_pieces(tmp_path, {}))


def test_truncated_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none"):
        list(sharded_pieces(tmp_path, {}))
    (tmp_path / NAME).write_bytes(b"\xff" * 9)
    with pytest.raises(CheckpointError, match="truncated"):
        list(sharded_pieces(tmp_path, {}))
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link"):
        list(sharded_pieces(tmp_path, {}))
