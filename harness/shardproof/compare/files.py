"""The files of a checkpoint, read piece by piece: by position, into memory that the caller has.

*Verifies*: a file is a regular one and, inside a checkpoint's folder, not a link; it is long enough; it is the same
file, with the same size and time of change, from its first use to the last; bytes have the checksum that their format
has for them.
*Does not verify*: that nobody wrote to a file between two reads without changing its time.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from shardproof.readers.errors import WHOLE, CheckpointError, bad
from shardproof.readers.pieces import open_regular

OPEN = 64
"""So many files of a checkpoint are open at once; a large one has thousands."""

STEP_BYTES = 1 << 20
"""How much is read at once where only the checksum is wanted."""

_Identity = tuple[int, int, int, int]


class Files:
    """All files of one checkpoint.

    Args:
        named: what the user named, which may be a link. on_read: called with every number of bytes that was read.
    """

    def __init__(self, named: Path, on_read: Callable[[int], None] = lambda count: None) -> None:
        self.named = named
        self.on_read = on_read
        self._open: OrderedDict[Path, BinaryIO] = OrderedDict()
        self._identity: dict[Path, _Identity] = {}

    def size(self, path: Path) -> int:
        """Bytes of a file.

        Raises:
            CheckpointError: it cannot be opened, or is no regular file.
        """
        self._file(path)
        return self._identity[path][2]

    def used(self, path: Path) -> bool:
        """Whether anything was asked of a file so far."""
        return path in self._identity

    def total(self) -> int:
        """Bytes of all files that were used so far."""
        return sum(identity[2] for identity in self._identity.values())

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """A few bytes of a file.

        Raises:
            CheckpointError: there are not so many, or they cannot be read.
        """
        data = bytearray(length)
        self.read_into(path, offset, memoryview(data))
        return bytes(data)

    def read_into(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `offset` on.

        Raises:
            CheckpointError: there are not so many, or they cannot be read.
        """
        descriptor = self._file(path).fileno()
        done = 0
        while done < len(into):
            try:
                count = os.preadv(descriptor, [into[done:]], offset + done)
            except OSError as error:
                raise bad(f"{path}: cannot read", error.strerror, "a readable file", FORM) from None
            if count == 0:
                given = f"cut off: no byte {offset + done}"
                raise bad(f"{path}: content", given, "a whole file that nobody changes meanwhile", WHOLE)
            done += count
        self.on_read(done)

    def require_unchanged(self) -> None:
        """Check that every file is still the one that was opened.

        Raises:
            CheckpointError: one was changed, replaced or removed.
        """
        for path, identity in self._identity.items():
            try:
                found = _identity(os.stat(path))
            except OSError:
                raise _changed(path) from None
            if found != identity:
                raise _changed(path)

    def close(self) -> None:
        """Close every file that was opened for reading."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, path: Path) -> BinaryIO:
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        file = open_regular(path, 0) if path == self.named else open_regular(path)
        identity = _identity(os.fstat(file.fileno()))
        if self._identity.setdefault(path, identity) != identity:
            file.close()
            raise _changed(path)
        self._open[path] = file
        if len(self._open) > OPEN:
            self._open.popitem(last=False)[1].close()
        return file


FORM = "shardproof diff checkpoints/step-100 checkpoints/step-200"


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: Path) -> CheckpointError:
    return bad(f"{path}: file", "one that changed while it was read", "a checkpoint that nobody writes", FORM)


class Extent:
    """A run of bytes of a file: a storage, with its checksum where the format has one.

    A checksum is worked out while bytes are read in their order; `finish` reads what nobody has asked for in order, so
    that a storage of which anything was used is always verified as a whole.

    Args:
        start, length: in bytes. name: for messages. crc: CRC-32 of all bytes; None where there is none to verify.
    """

    __slots__ = ("_next", "_running", "_used", "crc", "files", "length", "name", "path", "start")

    def __init__(self, files: Files, path: Path, start: int, length: int, name: str, crc: int | None = None) -> None:
        self.files, self.path, self.start, self.length, self.name, self.crc = files, path, start, length, name, crc
        self._next, self._running, self._used = 0, 0, False

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset` on, which with all of `into` lies inside.

        Raises:
            CheckpointError: bytes cannot be read, or the checksum is wrong.
        """
        if offset < 0 or offset + len(into) > self.length:
            given = f"{len(into)} bytes at {offset}"
            raise bad(f"{self.path}: {self.name}", given, f"inside its {self.length} bytes", FORM)
        self.files.read_into(self.path, self.start + offset, into)
        self._used = True
        if self.crc is not None and offset <= self._next < offset + len(into):
            self._running = zlib.crc32(into[self._next - offset :], self._running)
            self._next = offset + len(into)
            self._check()

    def finish(self) -> None:
        """Verify the checksum if anything was read.

        Raises:
            CheckpointError: it is wrong.
        """
        if self.crc is None or not self._used:
            return
        buffer = memoryview(bytearray(min(STEP_BYTES, self.length)))
        while self._next < self.length:
            self.read_into(self._next, buffer[: min(len(buffer), self.length - self._next)])

    def _check(self) -> None:
        if self._next == self.length and self._running != self.crc:
            given = f"damaged bytes, of CRC {self._running:08x}"
            allowed = (
                f"{self.crc:08x}, as the archive says; `shardproof diff --no-checksums` compares them all the same"
            )
            raise bad(f"{self.path}: {self.name}", given, allowed, WHOLE)
