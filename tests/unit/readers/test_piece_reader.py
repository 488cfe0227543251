"""What is made of the items of a checkpoint: pieces with their path, rank, box and bytes.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`); the refusals are in
`golden/refusals.txt`."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import torch
from shardproof.readers.errors import CheckpointError
from shardproof.readers.metadata import Item
from shardproof.readers.pieces import ObjectPiece, Piece, TensorPiece, check_layout, pieces
from shardproof.readers.symbolic import Name
from shardproof.readers.values import Quantised
from shardproof.readers.vocabulary import Vocabulary
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

pytestmark = pytest.mark.usefixtures("refused_word_for_word")

FLOATS = torch.arange(4.0).reshape(2, 2)


def distributed(folder: Path, value: object, like: torch.Tensor | None, whole: tuple[int, ...] = ()) -> list[Piece]:
    """The pieces of a checkpoint of the key `x`, whose one item rank 3 wrote.

    value: what its file holds. like: a tensor of the dtype and shape that `.metadata` says; None for an object. whole:
    the shape of the tensor whose shards were flattened, as Megatron-Core said it before 0.16.
    """
    folder.mkdir()
    payload = samples.saved(value)
    (folder / "__3_0.distcp").write_bytes(payload)
    entry: Any = BytesStorageMetadata()
    index = MetadataIndex("x")
    if like is not None:
        start = torch.Size([0] * like.dim())
        entry = TensorStorageMetadata(
            TensorProperties(dtype=like.dtype), like.shape, [ChunkStorageMetadata(start, like.shape)]
        )
        index = MetadataIndex("x", start)
    found = Metadata({"x": entry}, {"x": ("x",)}, {index: _StorageInfo("__3_0.distcp", 0, len(payload))})
    found.mcore_data = {"x": {"nd_reformulated_orig_global_shape": whole}} if whole else {}  # type: ignore[attr-defined]
    (folder / ".metadata").write_bytes(pickle.dumps(found, protocol=4))
    return list(pieces(folder))


def test_a_tensor_is_of_the_rank_that_wrote_it(tmp_path: Path) -> None:
    found = distributed(tmp_path / "c", FLOATS, FLOATS)
    assert found == [TensorPiece(("x",), 3, "fp32", (2, 2), (0, 0), (2, 2), samples.raw(FLOATS), b"")]


def test_an_object_may_hold_tensors_and_numbers(tmp_path: Path) -> None:
    assert distributed(tmp_path / "c", {"w": FLOATS, "n": 7}, None) == [
        TensorPiece(("x", "w"), 3, "fp32", (2, 2), (0, 0), (2, 2), samples.raw(FLOATS)),
        ObjectPiece(("x", "n"), 3, 7),
    ]


def test_a_flat_range_of_shards_is_cut_into_boxes_of_its_tensor(tmp_path: Path) -> None:
    flat = torch.arange(4.0).reshape(1, 1, 4)  # the one shard of a tensor of 2 × 2
    assert distributed(tmp_path / "c", flat, flat, (2, 2)) == [
        TensorPiece(("x",), 3, "fp32", (2, 2), (0, 0), (2, 2), samples.raw(FLOATS))
    ]


def test_an_empty_shard_may_have_lost_its_inner_dims(tmp_path: Path) -> None:
    assert distributed(tmp_path / "c", torch.empty(0), torch.empty(0, 3)) == [
        TensorPiece(("x",), 3, "fp32", (0, 3), (0, 0), (0, 3), b"")
    ]


@pytest.mark.parametrize(
    ("value", "like"),
    [
        (7, FLOATS),
        ({"w": FLOATS}, FLOATS),
        (FLOATS.to(torch.bfloat16), FLOATS),
        (FLOATS.reshape(4), FLOATS),
        (torch.empty(0), FLOATS),
        (torch.ones(1, 1), torch.ones(1)),
    ],
    ids=["a number", "a dict", "another dtype", "another shape", "no elements", "another number of dims"],
)
def test_an_item_that_is_not_what_the_metadata_says(tmp_path: Path, value: object, like: torch.Tensor) -> None:
    with pytest.raises(CheckpointError):
        distributed(tmp_path / "c", value, like)


# --- tensors with a scale ---------------------------------------------------------------------------------


class Scaled:
    """A library's tensor of fp8e4m3, pickled as a call of this module's `scaled` with its bytes and the inverse of its
    scale."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.data = torch.arange(4, dtype=torch.uint8).reshape(shape)

    def __reduce__(self) -> Any:
        return scaled, (self.data, torch.tensor([0.5]))


def scaled(data: torch.Tensor, inverse: torch.Tensor) -> None:
    """What a library has in its place."""


@pytest.fixture
def with_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    makes = {Name(__name__, "scaled"): lambda args, decode: Quantised(decode(args[0]), decode(args[1]), "bf16")}
    monkeypatch.setattr("shardproof.readers.values.known", lambda: Vocabulary(tensors=makes))


@pytest.mark.usefixtures("with_scaled")
def test_a_tensor_with_a_scale_is_its_bytes_and_the_inverse(tmp_path: Path) -> None:
    assert distributed(tmp_path / "c", Scaled((2, 2)), FLOATS.to(torch.bfloat16)) == [
        TensorPiece(("x",), 3, "fp8e4m3", (2, 2), (0, 0), (2, 2), bytes(range(4)), samples.raw(torch.tensor([0.5])))
    ]


@pytest.mark.usefixtures("with_scaled")
@pytest.mark.parametrize("like", [FLOATS, torch.ones(4, dtype=torch.bfloat16)], ids=["another dtype", "another shape"])
def test_a_tensor_with_a_scale_that_is_not_what_the_metadata_says(tmp_path: Path, like: torch.Tensor) -> None:
    with pytest.raises(CheckpointError):
        distributed(tmp_path / "c", Scaled((2, 2)), like)


# --- whole files ------------------------------------------------------------------------------------------


def test_a_full_file_is_of_rank_0_and_may_be_a_link(tmp_path: Path) -> None:
    samples.save_full({"w": FLOATS, "n": 7}, tmp_path / "file")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert list(pieces(tmp_path / name)) == [
            TensorPiece(("w",), 0, "fp32", (2, 2), (0, 0), (2, 2), samples.raw(FLOATS)),
            ObjectPiece(("n",), 0, 7),
        ]


def test_a_full_file_may_be_a_list_of_states_of_which_some_are_none(tmp_path: Path) -> None:
    found = pieces(samples.save_full([{"n": 7}, None, {"n": 8}], tmp_path / "c"))
    assert [*found] == [ObjectPiece((0, "n"), 0, 7), ObjectPiece((1,), 0, None), ObjectPiece((2, "n"), 0, 8)]
    with pytest.raises(CheckpointError):
        list(pieces(samples.save_full([{"n": 7}, 8], tmp_path / "d")))


def test_a_file_may_be_as_large_as_is_said_and_no_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickle.dumps({"n": 7}, protocol=2))
    monkeypatch.setattr("shardproof.readers.pieces.MAX_CHECKPOINT_BYTES", path.stat().st_size)
    assert list(pieces(path)) == [ObjectPiece(("n",), 0, 7)]
    monkeypatch.setattr("shardproof.readers.pieces.MAX_CHECKPOINT_BYTES", path.stat().st_size - 1)
    with pytest.raises(CheckpointError):
        list(pieces(path))


def test_an_item_has_at_least_one_byte(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"abc")
    shortest = Item("a", ("a",), "", (), None, "__0_0.distcp", 2, 1)
    assert check_layout(tmp_path, [shortest]) == {"__0_0.distcp": 3}
    with pytest.raises(CheckpointError):
        check_layout(tmp_path, [replace(shortest, length=0)])
