"""Safetensors: one file, a folder of them with Hugging Face's index, or the shards of torch's distributed checkpoint.

A file is a length, a JSON header and bytes. The shards that torch writes say in the header at which offsets of the
whole tensor each piece begins, but nowhere how large the whole is: it is taken to end where its last piece ends.

*Verifies*: the header is one and names every tensor once; each lies inside the file with the bytes that its dtype and
shape ask for, and shares none; the index names files of its own folder, and every tensor in the file where it is.
*Does not verify*: bytes that no tensor has; checksums, since the format has none.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shardproof.compare.contents import Contents, Part, Tensor
from shardproof.compare.dtypes import SAFETENSORS, itemsize
from shardproof.compare.files import Extent
from shardproof.compare.views import Ints, View, contiguous
from shardproof.readers.errors import CheckpointError, bad
from shardproof.readers.pieces import KeyPath

FORM = "safetensors.torch.save_file(state, 'model.safetensors')"
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As the format says."""

_PLACES = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    dtype: str
    start: Ints
    size: Ints
    view: View


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a header says of a tensor; its bytes lie from `first` to `last` behind the header."""

    dtype: str
    size: Ints
    first: int
    last: int


def looks_like_safetensors(head: bytes) -> bool:
    """Whether nine bytes can begin a safetensors file: a plausible header length in eight bytes, then the `{` of a JSON
    object."""
    return len(head) >= 9 and struct.unpack("<Q", head[:8])[0] <= MAX_HEADER_BYTES and head[8:9] == b"{"


def add_safetensors(contents: Contents, found: Iterable[Path], path: KeyPath = ()) -> None:
    """Take up the tensors of some files, of which several may hold pieces of one.

    Raises:
        CheckpointError: one is truncated or not what its header says.
    """
    pieces: dict[str, list[_Piece]] = {}
    for file in found:
        for piece in _pieces(contents, file):
            pieces.setdefault(piece.name, []).append(piece)
    for name, parts in pieces.items():
        first = parts[0]
        if any((p.dtype, len(p.size)) != (first.dtype, len(first.size)) for p in parts):
            raise bad(f"{contents.path}: pieces of {name!r}", "of several dtypes or dims", "one", FORM)
        ends = [tuple(a + n for a, n in zip(p.start, p.size, strict=True)) for p in parts]
        shape = tuple(max(end) for end in zip(*ends, strict=True))
        boxes = (Part(p.start, p.size, _place(p.view), _opened(p.view)) for p in parts)
        contents.add(Tensor((*path, name), first.dtype, shape, tuple(boxes)))


def add_indexed(contents: Contents, index: Path, path: KeyPath = ()) -> None:
    """Take up the tensors that a `*.safetensors.index.json` names.

    Raises:
        CheckpointError: the index, or a file of it, is damaged or not there, or they disagree.
    """
    files = indexed_files(contents, index, SUFFIX)
    add_safetensors(contents, sorted(set(files.values())), path)
    held = {str(p.path[-1]): Path(p.parts[0].place[0]) for p in contents.tensors.values() if p.path[:-1] == path}
    for name, file in files.items():
        if held.get(name) != file:
            raise bad(f"{index}: file of {name!r}", file.name, "the file that has it", FORM)
    for name in held.keys() - files.keys():
        raise bad(f"{index}: tensor", name, "one that weight_map names", FORM)


def indexed_files(contents: Contents, index: Path, suffix: str) -> dict[str, Path]:
    """Name → file, from an index of Hugging Face's.

    Raises:
        CheckpointError: it is damaged, or names what is no file of its folder.
    """
    form = '{"weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}'
    size = contents.files.size(index)
    if size > MAX_HEADER_BYTES:
        raise bad(f"{index}: bytes", size, f"at most {MAX_HEADER_BYTES}", form)
    document = _json(contents.files.read(index, 0, size), str(index), form)
    named = document.get("weight_map")
    if not isinstance(named, dict) or not named:
        raise bad(f"{index}: weight_map", type(named).__name__, "names and their files", form)
    for name, file in named.items():
        plain = isinstance(file, str) and file.endswith(suffix) and "/" not in file and "\0" not in file
        if not plain:
            raise bad(f"{index}: file of {name!r}", file, f"*{suffix} beside the index", form)
    return {name: index.parent / file for name, file in named.items()}


def _pieces(contents: Contents, file: Path) -> Iterable[_Piece]:
    header, body = _header(contents, file)
    try:
        metadata = header.pop("__metadata__", {})
        places = json.loads(metadata.get(_PLACES, "{}"))
        entries = {name: _entry(file, name, entry) for name, entry in header.items()}
        extents = _extents(contents, file, entries, body)
        for name, entry in entries.items():
            dtype, size = entry.dtype, entry.size
            start = _counts(places.get(name, {}).get("saved_offsets", [0] * len(size)))
            if len(start) != len(size):
                raise ValueError(f"saved_offsets of {name!r}")
            yield _Piece(name, dtype, start, size, View(extents[name], dtype, 0, size, contiguous(size)))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        given = f"{type(error).__name__}: {error}"
        raise bad(f"{file}: metadata in the header", given, "none, or those of torch's shards", FORM) from None


def _entry(file: Path, name: str, entry: object) -> _Entry:
    """One tensor of a header.

    Raises:
        CheckpointError: it lacks a part, or has one that is not as the format says.
    """
    what = f"{file}: header of {name!r}"
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        given = sorted(entry) if isinstance(entry, dict) else [type(entry).__name__]
        raise bad(what, ", ".join(given), "dtype, shape and data_offsets", FORM)
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        raise bad(f"{what}: dtype", dtype, SAFETENSORS, FORM)
    try:
        size, offsets = _counts(entry["shape"]), _counts(entry["data_offsets"])
    except TypeError as error:
        raise bad(what, str(error), "a shape and data_offsets of whole numbers from 0", FORM) from None
    if len(offsets) != 2:
        raise bad(f"{what}: data_offsets", len(offsets), "2 numbers, where its bytes begin and end", FORM)
    return _Entry(SAFETENSORS[dtype], size, *offsets)


def _extents(contents: Contents, file: Path, entries: Mapping[str, _Entry], body: int) -> dict[str, Extent]:
    """Where each tensor's bytes lie; `body` is where all of them begin."""
    size, end = contents.files.size(file) - body, 0
    extents = {}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].first, item[1].last)):
        first, last = entry.first, entry.last
        needed = prod(entry.size) * itemsize(entry.dtype)
        if (first < end and needed) or last > size or last - first != needed:
            given = f"{'cut off: ' * (last > size)}{first} to {last}"
            raise bad(f"{file}: bytes of {name!r}", given, f"{needed} of its own, up to {size}", FORM)
        end = max(end, last)
        extents[name] = Extent(contents.files, file, body + first, needed, name)
    return extents


def _header(contents: Contents, file: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the bytes behind it begin."""
    size = contents.files.size(file)
    length = struct.unpack("<Q", contents.files.read(file, 0, 8))[0] if size >= 8 else MAX_HEADER_BYTES + 1
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise bad(f"{file}: header", "truncated", "its length, then as many bytes of JSON", FORM)
    return _json(contents.files.read(file, 8, length), f"{file}: header", FORM), 8 + length


def _json(data: bytes, origin: str, form: str) -> dict[str, Any]:
    try:
        document = json.loads(data, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise bad(origin, f"no JSON: {error}", "a JSON object, every key once", form) from None
    if not isinstance(document, dict):
        raise bad(origin, type(document).__name__, "a JSON object", form)
    return document


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key that occurs twice")
    return found


def _counts(values: object) -> Ints:
    """Whole numbers from 0, as they are."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise TypeError(f"not a list of counts: {values!r:.100}")
    return tuple(values)


def _place(view: View) -> tuple[str, int]:
    return str(view.extent.path), view.extent.start


def _opened(view: View) -> Any:
    return lambda: view
