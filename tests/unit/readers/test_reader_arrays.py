"""Arrays of numpy in a pickle: taken as data where they are plain, refused otherwise, and nothing executed."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from shardproof.readers.errors import CheckpointError
from shardproof.readers.pieces import ObjectPiece, pieces
from shardproof.readers.symbolic import parse
from shardproof.readers.values import Value, decode

WORDS = np.arange(4, dtype=np.uint32)


def decoded(data: bytes) -> Value:
    return decode(parse(data, "test"), "test")


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("code", ["u4", "i8", "f8", "b1", "u1", "f2"])
def test_a_plain_array_is_its_dtype_shape_and_bytes(protocol: int, code: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(code)
    assert decoded(pickle.dumps(array, protocol)) == {
        "dtype": array.dtype.name, "shape": [2, 3], "data": array.tobytes(),
    }  # fmt: skip


def test_an_array_without_elements() -> None:
    assert decoded(pickle.dumps(np.empty((0, 3), np.float32), 2)) == {
        "dtype": "float32", "shape": [0, 3], "data": b"",
    }  # fmt: skip


def test_the_name_of_numpy_1_is_known() -> None:
    data = pickle.dumps(WORDS, 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert decoded(data) == {"dtype": "uint32", "shape": [4], "data": WORDS.tobytes()}


def test_the_state_of_numpys_generator_in_a_file(tmp_path: Path) -> None:
    state = np.random.RandomState(5).get_state()
    torch.save({"rng": state}, tmp_path / "file.pt")
    found = {piece.path: piece.value for piece in pieces(tmp_path / "file.pt") if isinstance(piece, ObjectPiece)}
    assert found["rng", 0] == "MT19937"
    assert found["rng", 1, "data"] == np.asarray(state[1]).tobytes()
    assert (found["rng", 1, "dtype"], found["rng", 1, "shape"], found["rng", 2]) == ("uint32", [624], state[2])


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, [("a", "u4"), ("b", "f8")]),
        np.zeros(2, ">u4"),
        np.zeros(2, "c8"),
        np.zeros(2, "S3"),
        np.zeros(2, "M8[s]"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.random.RandomState(1),
        np.float64(1.0),
        np.dtype("u4"),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_others_are_refused(value: object) -> None:
    if isinstance(value, np.ndarray) and value.dtype == object:
        value[0] = None
    with pytest.raises(CheckpointError, match="nothing was executed"):
        decoded(pickle.dumps(value, 2))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x04\x85", b"K\x05\x85"),  # one element more than there are bytes
        (b"\x03\x00\x00\x00", b"\x03\x00\xc4\x80"),  # text that latin1 does not have is no bytes
        (b"cnumpy\nndarray\n", b"cnumpy\nmatrix\n"),
        (b"c_codecs\nencode\n", b"c_codecs\ndecode\n"),
        (b"numpy._core.multiarray\n_reconstruct", b"numpy._core.multiarray\nscalar"),
        (b"cnumpy\ndtype\n", b"cnumpy\ndtypes\n"),
        (b"latin1", b"utf_16"),
    ],
    ids=["shape", "text", "subclass", "decode", "scalar", "dtypes", "encoding"],
)
def test_what_numpy_does_not_write_is_refused(old: bytes, new: bytes) -> None:
    data = pickle.dumps(WORDS, 2)
    assert old in data
    with pytest.raises(CheckpointError):
        decoded(data.replace(old, new))
