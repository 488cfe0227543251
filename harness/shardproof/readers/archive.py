"""A file written by `torch.save`, read without torch: a zip with one pickle and the raw bytes of each storage.

The layout is torch.serialization's: `{root}/data.pkl`, `{root}/byteorder`, and `{root}/data/{key}` for a storage.

*Verifies*: every entry read lies in the file, is stored (not compressed) and has the right checksum; a storage has
exactly the bytes of its element count; a tensor lies inside its storage; the pickle names plain data only.
*Does not verify*: entries that no tensor refers to, the format version, the device a tensor came from.
"""

from __future__ import annotations

import io
import zipfile

import numpy as np

from shardproof.observe.record import ITEMSIZE
from shardproof.readers.errors import WHOLE, CheckpointError, bad
from shardproof.readers.symbolic import parse
from shardproof.readers.values import FORM, Storage, Tensor, Value, decode

MAX_CHECKPOINT_BYTES = 1 << 30


class Budget:
    """How many bytes of tensors one checkpoint may still give. A hostile stride of 0 makes an endless tensor out of
    a few bytes."""

    def __init__(self, limit_bytes: int = MAX_CHECKPOINT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.spent_bytes = 0

    def spend(self, count: int, origin: str) -> None:
        self.spent_bytes += count
        if self.spent_bytes > self.limit_bytes:
            raise bad(f"{origin}: bytes of its tensors", self.spent_bytes,
                      f"at most {self.limit_bytes} in one checkpoint", "a checkpoint of a small model")  # fmt: skip


class Archive:
    """One archive.

    Args:
        data: all its bytes. origin: which file it is, for messages. budget: shared by a checkpoint's archives.

    Raises:
        CheckpointError: it is not one, or damaged.
    """

    def __init__(self, data: bytes, origin: str, budget: Budget) -> None:
        self._origin = origin
        self._budget = budget
        self._storages: dict[str, bytes] = {}
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError) as error:
            raise no_archive(origin, error, data[:8]) from None
        self._entries = self._index()
        roots = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise bad(
                f"{origin}: zip archive", f"{len(roots)} entries named */data.pkl", "one, as torch.save writes it", FORM
            )
        self._root = roots[0].removesuffix("data.pkl")
        order = self._read("byteorder") if f"{self._root}byteorder" in self._entries else b"little"
        if order != b"little":
            raise bad(f"{origin}: byte order", order[:16].decode(errors="replace"), "little", FORM)

    def value(self) -> Value:
        """What was saved.

        Raises:
            CheckpointError: the pickle is damaged or names anything but plain data and tensors.
        """
        origin = f"{self._origin}: data.pkl"
        return decode(parse(self._read("data.pkl"), origin), origin)

    def data(self, tensor: Tensor) -> bytes:
        """The tensor's elements, row-major, little endian.

        Raises:
            CheckpointError: the storage has the wrong size, the tensor leaves it, or the budget is spent.
        """
        item = ITEMSIZE[tensor.dtype]
        self._budget.spend(tensor.numel * item, self._origin)
        if tensor.numel == 0:
            return b""
        storage = self._storage(tensor.storage)
        strides = tuple(stride * item for stride in tensor.stride)
        try:
            view = np.ndarray(tensor.shape, f"V{item}", storage, tensor.offset_elements * item, strides)
        except (ValueError, TypeError, OverflowError):
            given = f"offset {tensor.offset_elements}, size {tensor.shape}, stride {tensor.stride}"
            allowed = f"elements inside its storage of {tensor.storage.numel}"
            raise bad(f"{self._origin}: tensor", given, allowed, FORM) from None
        return view.tobytes()

    def _storage(self, storage: Storage) -> bytes:
        name = f"data/{storage.key}"
        data = self._storages.get(name)
        if data is None:
            data = self._storages[name] = self._read(name)
        expected = storage.numel * ITEMSIZE[storage.dtype]
        if len(data) != expected:
            allowed = f"{expected}: {storage.numel} elements of {storage.dtype}"
            raise bad(f"{self._origin}: bytes of {name}", len(data), allowed, FORM)
        return data

    def _index(self) -> dict[str, zipfile.ZipInfo]:
        entries: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            what = f"{self._origin}: archive entry"
            if info.filename in entries:
                raise bad(what, info.filename, "every name once", FORM)
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise bad(what, f"{info.filename}, compressed or encrypted", "stored ones, as torch writes them", FORM)
            entries[info.filename] = info
        return entries

    def _read(self, name: str) -> bytes:
        info = self._entries.get(self._root + name)
        if info is None:
            raise bad(f"{self._origin}: archive entry", self._root + name, "one that the archive has", FORM)
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, OSError, OverflowError) as error:
            given = f"damaged: {error}"
            raise bad(f"{self._origin}: archive entry {info.filename}", given, "an intact one", WHOLE) from None


def no_archive(origin: str, error: Exception, begin: bytes) -> CheckpointError:
    """The error of a file that is no zip archive, or no whole one: the list of its entries is at its end.

    Args:
        error: what zipfile says. begin: the first bytes of the file.
    """
    if begin.startswith(b"PK\x03\x04"):
        return bad(f"{origin}: file of torch.save", f"cut off or damaged: {error}", "a whole zip archive", WHOLE)
    given = f"{error}; it begins with {begin.hex(' ')}" if begin else "an empty file"
    return bad(f"{origin}: not a torch.save archive", given, "a zip archive (50 4b 03 04)", FORM)
