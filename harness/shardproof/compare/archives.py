"""Indexes a torch.save file of any size: its plain values, and its tensors as views of the zip archive's entries.

Only the directory of the zip and the pickle are read; a storage stays where it is. A distributed checkpoint has such an
archive for every item, inside a larger file.

*Verifies*: entries are stored as they are, lie inside the file and share no bytes; the pickle has its checksum; a
storage has the bytes of its element count, and a tensor lies inside its storage. Checksums of storages are verified
while they are read (`files`).
*Does not verify*: entries that no tensor refers to.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shardproof.compare.contents import Contents, Plain, whole
from shardproof.compare.dtypes import WIDE, itemsize
from shardproof.compare.files import Extent, Files
from shardproof.compare.pickles import values_of
from shardproof.compare.views import View
from shardproof.readers.archive import no_archive
from shardproof.readers.errors import bad
from shardproof.readers.pieces import KeyPath, leaves
from shardproof.readers.values import FORM, Quantised, Storage, Tensor, Value

MAX_DIRECTORY_BYTES = 16 << 20
"""Bytes of a zip's directory, some hundred thousand entries; it is read as a whole."""

_LOCAL = struct.Struct("<4s22xHH")
SCALE = "scale_inv"
"""What stands behind the name of a tensor whose elements are divided by a scale, for that."""


class Archive:
    """One archive of torch.save.

    Args:
        start, length: where it lies in the file. foreign: gets the names in its pickle that are no plain data.
        checksums: whether they are verified.

    Raises:
        CheckpointError: it is none, or damaged.
    """

    def __init__(
        self, files: Files, path: Path, start: int, length: int, foreign: set[str], *, checksums: bool
    ) -> None:
        self._files, self._path, self._start, self._length = files, path, start, length
        self._foreign, self._checksums = foreign, checksums
        self.origin = f"{path} at {start}" if start else str(path)
        self._entries = self._index()
        self._used: dict[str, Extent] = {}
        roots = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise bad(
                f"{self.origin}: zip archive",
                f"{len(roots)} entries named */data.pkl",
                "one, as torch.save writes it",
                FORM,
            )
        self._root = roots[0].removesuffix("data.pkl")
        order = self._small("byteorder", 16) if f"{self._root}byteorder" in self._entries else b"little"
        if order != b"little":
            raise bad(f"{self.origin}: byte order", order.decode(errors="replace"), "little", FORM)

    def value(self) -> Value:
        """What was saved.

        Raises:
            CheckpointError: the pickle is damaged or too large.
        """
        return values_of(self._small("data.pkl", WIDE.pickle_bytes), f"{self.origin}: data.pkl", self._foreign)

    def view(self, tensor: Tensor) -> View:
        """Where a tensor lies.

        Raises:
            CheckpointError: its storage is not there or of another size, or the tensor leaves it.
        """
        extent = self._storage(tensor.storage)
        view = View(extent, tensor.dtype, tensor.offset_elements, tensor.shape, tensor.stride, tensor.flags)
        view.require_inside()
        return view

    def extents(self) -> list[Extent]:
        """The storages that views were made of."""
        return list(self._used.values())

    def _storage(self, storage: Storage) -> Extent:
        name = f"data/{storage.key}"
        extent = self._used.get(name)
        if extent is None:
            extent = self._used[name] = self._extent(name)
        expected = storage.numel * itemsize(storage.dtype)
        if extent.length != expected:
            allowed = f"{expected}: {storage.numel} elements of {storage.dtype}"
            raise bad(f"{self.origin}: bytes of {name}", extent.length, allowed, FORM)
        return extent

    def _small(self, name: str, most: int) -> bytes:
        extent = self._extent(name)
        if extent.length > most:
            raise bad(f"{self.origin}: bytes of {name}", extent.length, f"at most {most}", FORM)
        data = bytearray(extent.length)
        extent.read_into(0, memoryview(data))
        return bytes(data)

    def _extent(self, name: str) -> Extent:
        found = self._entries.get(self._root + name)
        if found is None:
            raise bad(f"{self.origin}: archive entry", self._root + name, "one that the archive has", FORM)
        crc = found.crc if self._checksums else None
        return Extent(self._files, self._path, found.start, found.length, found.name, crc)

    def _index(self) -> dict[str, _Entry]:
        window = _Window(self._files, self._path, self._start, self._length)
        try:
            listed = zipfile.ZipFile(window).infolist()
        except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error) as error:
            begin = self._files.read(self._path, self._start, min(8, self._length))
            raise no_archive(self.origin, error, begin) from None
        entries: dict[str, _Entry] = {}
        for info in listed:
            what = f"{self.origin}: archive entry"
            if info.filename in entries:
                raise bad(what, info.filename, "every name once", FORM)
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise bad(what, f"{info.filename}, compressed or encrypted", "stored ones, as torch writes them", FORM)
            entries[info.filename] = self._entry(info)
        for before, after in pairwise(sorted(entries.values(), key=lambda entry: entry.start)):
            if before.start + before.length > after.start:
                raise bad(f"{self.origin}: archive entries", f"{after.name} inside {before.name}", "apart", FORM)
        return entries

    def _entry(self, info: zipfile.ZipInfo) -> _Entry:
        """Where the entry's bytes lie: behind its own header."""
        at, end = self._start + info.header_offset, self._start + self._length
        sound = info.header_offset >= 0 and at + _LOCAL.size <= end
        magic, name, extra = _LOCAL.unpack(self._files.read(self._path, at, _LOCAL.size)) if sound else (b"", 0, 0)
        start = at + _LOCAL.size + name + extra
        if magic != b"PK\x03\x04" or start + info.file_size > end:
            where = f"{self.origin}: archive entry {info.filename}"
            raise bad(where, "not where the directory says", "an intact one, inside the file", FORM)
        return _Entry(info.filename, start, info.file_size, info.CRC)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    start: int
    length: int
    crc: int


class _Window(io.RawIOBase):
    """A part of a file as a file, for the zip's directory."""

    def __init__(self, files: Files, path: Path, start: int, length: int) -> None:
        self._files, self._path, self._start, self._length = files, path, start, length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the archive")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        count = left if size < 0 else min(size, left)
        if count > MAX_DIRECTORY_BYTES:
            where = f"{self._path}: bytes of the archive's directory"
            raise bad(where, count, f"at most {MAX_DIRECTORY_BYTES}", FORM)
        data = self._files.read(self._path, self._start + self._position, count)
        self._position += count
        return data


def add_leaves(contents: Contents, path: KeyPath, archive: Archive, value: Value) -> None:
    """Take up every leaf of a saved value.

    Raises:
        CheckpointError: a tensor leaves its storage, or a name occurs twice.
    """
    for at, leaf in leaves(path, value):
        match leaf:
            case Tensor():
                contents.add(whole(at, archive.view(leaf)))
            case Quantised(data=data, scale_inv=inverse):
                view = archive.view(data)
                stored = View(view.extent, "fp8e4m3", view.offset, view.shape, view.stride)
                contents.add(whole(at, stored))
                contents.add(whole((*at, SCALE), archive.view(inverse)))
            case _:
                contents.add(Plain(at, leaf))
    contents.extents += archive.extents()


def add_archive(contents: Contents, file: Path, path: KeyPath = ()) -> None:
    """Take up everything that a file of torch.save holds, under names that begin with `path`.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    archive = open_archive(contents, file)
    value = archive.value()
    if not isinstance(value, dict | list | Tensor | Quantised):
        raise bad(f"{file}: saved value", type(value).__name__, "a dict of state, or a list of them", FORM)
    add_leaves(contents, path or (() if isinstance(value, dict | list) else (file.stem,)), archive, value)


def open_archive(contents: Contents, file: Path) -> Archive:
    """The archive that a whole file is.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    size = contents.files.size(file)
    return Archive(contents.files, file, 0, size, contents.foreign, checksums=contents.checksums)
