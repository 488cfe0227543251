"""Any checkpoint as one flat stream of pieces: boxes of tensors and plain objects, each with its path.

A directory is a distributed checkpoint (`.metadata` and `__{rank}_{n}.distcp`), unless it holds `full.pt`; that, and
any file, is one of torch.save. For example, a weight of 4 × 3 that two ranks saved gives two `TensorPiece`s with the
path `("model", "up.weight")`, of rows 0 to 1 from rank 0 and of rows 2 to 3 from rank 1.

*Verifies*: items lie inside their file, files inside the directory, no two items share bytes, an item has the dtype and
shape that the metadata gives it.
*Does not verify*: bytes between items, files that no item refers to.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from shardproof.layout import interval_boxes
from shardproof.observe.record import ITEMSIZE
from shardproof.readers import metadata
from shardproof.readers.archive import MAX_CHECKPOINT_BYTES, Archive, Budget
from shardproof.readers.errors import WHOLE, bad, unfamiliar
from shardproof.readers.metadata import Item, read_metadata
from shardproof.readers.symbolic import MAX_BYTES
from shardproof.readers.values import FORM, Quantised, Tensor, Value

FULL_FILE = "full.pt"
"""The file that makes a folder a checkpoint in one file."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The box `start, size` of the tensor at `path`, written by `rank`; data row-major, little endian. scale_inv: what
    its values are multiplied by, fp32; empty where they are not scaled."""

    path: KeyPath
    rank: int
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    data: bytes
    scale_inv: bytes = b""


@dataclass(frozen=True, slots=True)
class ObjectPiece:
    """A plain object at `path`, written by `rank`: a scalar, or a list without dicts and tensors."""

    path: KeyPath
    rank: int
    value: Value


Piece = TensorPiece | ObjectPiece


def key_of(path: KeyPath) -> str:
    """The path as DCP writes it: its parts joined by dots."""
    return ".".join(str(part) for part in path)


def pieces(path: Path) -> Iterator[Piece]:
    """Everything a checkpoint holds, one tensor's pieces after another.

    Memory: the pieces the caller keeps, and one file (`torch.save`) or one item (distributed).

    Raises:
        CheckpointError: missing, truncated, foreign, inconsistent or hostile.
    """
    if path.is_dir() and not (path / FULL_FILE).is_file():
        yield from _distributed(path)
    elif path.exists():
        path = path / FULL_FILE if path.is_dir() else path
        with open_regular(path, 0) as file:
            size = os.fstat(file.fileno()).st_size
            _check_total(size, path)
            archive = Archive(file.read(size), str(path), Budget())
        root = archive.value()
        chain = isinstance(root, list) and all(entry is None or isinstance(entry, dict) for entry in root)
        if not isinstance(root, dict) and not chain:
            raise bad(f"{path}: saved value", type(root).__name__, "a dict of state, or a list of them", FORM)
        yield from _flatten((), root, 0, archive)
    else:
        raise bad("checkpoint", str(path), "an existing directory or file", "shardproof inspect checkpoints/step100")


def _distributed(directory: Path) -> Iterator[Piece]:
    meta = directory / ".metadata"
    if not meta.exists():  # items alone are what a save left that did not end, and no other form
        error = bad if {file.suffix for file in directory.iterdir()} == {".distcp"} else unfamiliar
        raise error(f"{directory}: file .metadata", "none", "a complete distributed checkpoint", metadata.FORM)
    with open_regular(meta) as file:
        items = read_metadata(file.read(MAX_BYTES + 1), str(meta))
    sizes = check_layout(directory, items)
    _check_total(sum(sizes.values()), directory)
    budget = Budget()
    for item in items:
        origin = f"{directory / item.file} at {item.offset}: key {item.key!r}"
        with open_regular(directory / item.file) as file:
            file.seek(item.offset)
            archive = Archive(file.read(item.length), origin, budget)
        rank = int(item.file.split("_")[2])
        if item.box is None:
            yield from _flatten(item.path, archive.value(), rank, archive)
        else:
            start, size = item.box
            tensor, dtype, scale = _expect_tensor(archive.value(), item, origin)
            inverse = archive.data(scale) if scale else b""
            piece = TensorPiece(item.path, rank, dtype, item.shape, start, size, archive.data(tensor), inverse)
            yield from [piece] if item.whole is None else _unflattened(piece, item.whole)


def _unflattened(piece: TensorPiece, whole: tuple[int, ...]) -> Iterator[TensorPiece]:
    """A flat range of one shard of a tensor of shape `whole`, in boxes of that tensor.

    piece: its leading dims number the shards, and its last one counts the elements of a shard; it lies within one
    shard.
    """
    *grid, elements = piece.shape
    shard = tuple(size // n for size, n in zip(whole, grid, strict=True))
    origin = tuple(index * size for index, size in zip(piece.start, shard, strict=False))
    position = 0
    for box in interval_boxes(shard, min(piece.start[-1], elements), piece.size[-1]):
        start = tuple(o + s for o, s in zip(origin, box.start, strict=True))
        end = position + box.volume * ITEMSIZE[piece.dtype]
        yield TensorPiece(piece.path, piece.rank, piece.dtype, whole, start, box.size, piece.data[position:end])
        position = end


def _expect_tensor(value: Value, item: Item, origin: str) -> tuple[Tensor, str, Tensor | None]:
    """The stored tensor, the dtype of its elements, and the inverse of their scale where they are scaled."""
    assert item.box is not None
    size = item.box[1]
    expected = f"{item.dtype} of shape {size}, as .metadata says"
    if isinstance(value, Quantised) and value.dtype == item.dtype and value.data.shape == size:
        return value.data, "fp8e4m3", value.scale_inv
    if not isinstance(value, Tensor):
        raise bad(f"{origin}: stored item", type(value).__name__, expected, metadata.FORM)
    same = value.shape == size or prod(value.shape) == prod(size) == 0  # FSDP2 drops the inner dims of an empty shard
    if value.dtype != item.dtype or not same:
        raise bad(f"{origin}: stored item", f"{value.dtype} of shape {value.shape}", expected, metadata.FORM)
    return value, value.dtype, None


def check_layout(directory: Path, items: Iterable[Item]) -> dict[str, int]:
    """The size in bytes of each data file, after checking that items are inside them and apart.

    Raises:
        CheckpointError: they are not, or a file is not a regular one in the folder.
    """
    sizes: dict[str, int] = {}
    end: dict[str, int] = {}
    for item in sorted(items, key=lambda item: (item.file, item.offset)):
        where = f"{directory}: item of key {item.key!r}"
        if not re.fullmatch(r"__\d{1,6}_\d{1,6}\.distcp", item.file):
            raise bad(f"{where}: file", item.file, "__{rank}_{n}.distcp beside .metadata", "__0_0.distcp")
        if item.file not in sizes:
            with open_regular(directory / item.file) as file:
                sizes[item.file] = os.fstat(file.fileno()).st_size
        if item.offset < end.get(item.file, 0) or item.length < 1 or item.offset + item.length > sizes[item.file]:
            cut = "cut off: " * (item.offset + item.length > sizes[item.file] and item.length > 0)
            given = f"{cut}{item.length} bytes at {item.offset}"
            allowed = (
                f"from {end.get(item.file, 0)} (the end of the item before) to {sizes[item.file]} (the file's end)"
            )
            raise bad(f"{where}: place in {item.file}", given, allowed, WHOLE)
        end[item.file] = item.offset + item.length
    return sizes


def _check_total(total: int, path: Path) -> None:
    if total > MAX_CHECKPOINT_BYTES:
        raise bad(f"{path}: size in bytes", total, f"at most {MAX_CHECKPOINT_BYTES}", "a checkpoint of a small model")


def open_regular(path: Path, flags: int = os.O_NOFOLLOW) -> BinaryIO:
    """A regular file for reading; by default not through a link, and never waiting for a pipe's other end.

    Raises:
        CheckpointError: it cannot be opened, or is something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise bad(f"{path}: cannot open", reason, "a readable file, not a link", metadata.FORM) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise bad(f"{path}: kind of file", "not a regular file", "a regular file", metadata.FORM)
    return open(descriptor, "rb")


def _flatten(path: KeyPath, value: Value, rank: int, archive: Archive) -> Iterator[Piece]:
    for at, leaf in leaves(path, value):
        match leaf:
            case Tensor(dtype=dtype, shape=shape):
                yield TensorPiece(at, rank, dtype, shape, (0,) * len(shape), shape, archive.data(leaf))
            case Quantised(data=stored, scale_inv=inverse):
                zeros, data = (0,) * len(stored.shape), archive.data(stored)
                yield TensorPiece(at, rank, "fp8e4m3", stored.shape, zeros, stored.shape, data, archive.data(inverse))
            case _:
                yield ObjectPiece(at, rank, leaf)


def leaves(path: KeyPath, value: Value) -> Iterator[tuple[KeyPath, Value]]:
    """The leaves of a nested value, each with its path; a list without dicts, lists and tensors is a leaf, as in DCP.
    An empty dict has none."""
    match value:
        case dict():
            for key, entry in value.items():
                yield from leaves((*path, key if isinstance(key, int | str) else str(key)), entry)
        case list() if any(isinstance(entry, dict | list | Tensor | Quantised) for entry in value):
            for index, entry in enumerate(value):
                yield from leaves((*path, index), entry)
        case _:
            yield path, value
