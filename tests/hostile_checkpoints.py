"""Checkpoints that are foreign, broken or hostile, for the tests of all that reads checkpoints."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import torch


def foreign_files() -> dict[str, bytes]:
    safetensors = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(zipfile.ZipInfo("readme.txt"), "hello")
    return {
        "empty": b"",
        "text": b"these are not weights\n",
        "plain pickle": pickle.dumps({"model": {}}),
        "safetensors": struct.pack("<Q", len(safetensors)) + safetensors + bytes(4),
        "another zip": archive.getvalue(),
        "zeros": bytes(4096),
    }


def _item(metadata: Any, key: str = "model.a.weight") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def _set(**changes: object) -> Callable[[Any], None]:
    return lambda metadata: _item(metadata).__dict__.update(changes)


def _entry(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.a.weight"]


def _chunk(start: tuple[int, ...], size: tuple[int, ...]) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        _entry(metadata).chunks = [samples.ChunkStorageMetadata(torch.Size(start), torch.Size(size))]

    return edit


def _store_twice(metadata: Any) -> None:
    metadata.storage_data = {**metadata.storage_data, samples.MetadataIndex("model.b", (0, 0)): _item(metadata)}
    metadata.state_dict_metadata["model.b"] = _entry(metadata)


WRONG: dict[str, Callable[[Any], None]] = {
    "path outside": _set(relative_path="../../etc/passwd"),
    "absolute path": _set(relative_path="/etc/passwd"),
    "a path with a null byte": _set(relative_path="__0_0.distcp\0"),
    "another kind of file": _set(relative_path=".metadata"),
    "a path that is no text": _set(relative_path=7),
    "offset behind the end": _set(offset=1 << 40),
    "negative offset": _set(offset=-1),
    "absurd length": _set(length=1 << 62),
    "longer than any machine's numbers": _set(length=1 << 200),
    "empty item": _set(length=0),
    "length of half an item": _set(length=700),
    "transformed item": _set(transform_descriptors=["zstd"]),
    "chunk outside of the tensor": _chunk((1, 0), (3, 2)),
    "chunk of another rank": _chunk((0,), (3,)),
    "chunk smaller than its item": _chunk((0, 0), (2, 2)),
    "negative size": lambda m: setattr(_entry(m), "size", (-3, 2)),
    "size that is no shape": lambda m: setattr(_entry(m), "size", "3x2"),
    "endless shape": lambda m: setattr(_entry(m), "size", tuple([1] * 1000)),
    "no chunks": lambda m: _entry(m).chunks.clear(),
    "two chunks at one place": lambda m: _entry(m).chunks.append(_entry(m).chunks[0]),
    "another dtype": lambda m: setattr(_entry(m).properties, "dtype", torch.int32),
    "unknown dtype": lambda m: setattr(_entry(m).properties, "dtype", torch.complex64),
    "dtype of a name that is none": lambda m: setattr(_entry(m).properties, "dtype", torch.strided),
    "no item": lambda m: m.storage_data.pop(samples.MetadataIndex("model.a.weight", (0, 0))),
    "item of no key": lambda m: m.state_dict_metadata.pop("model.a.weight"),
    "tensor that is an object": lambda m: m.state_dict_metadata.update({"extra.iteration": _entry(m)}),
    "object that is a tensor": lambda m: m.state_dict_metadata.update(
        {"model.a.weight": samples.BytesStorageMetadata()}
    ),
    "one item for two keys": _store_twice,
    "path of another key": lambda m: m.planner_data.update({"model.a.weight": ("model", "b.weight")}),
    "no storage data": lambda m: setattr(m, "storage_data", None),
    "a list for a dict": lambda m: setattr(m, "state_dict_metadata", []),
}


def archive(
    path: Path, pickled: bytes, storage: bytes = bytes(4), how: int = zipfile.ZIP_STORED, order: str = "little"
) -> Path:
    with zipfile.ZipFile(path, "w", how) as file:
        file.writestr("x/data.pkl", pickled)
        file.writestr("x/byteorder", order)
        file.writestr("x/data/0", storage)
    return path


def tensor(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
    numel: int = 1,
    kind: str = "FloatStorage",
    key: str = "0",
) -> bytes:
    """The pickle of `{"w": tensor}` over one storage, as torch.save writes it."""

    def number(n: int) -> bytes:
        raw = n.to_bytes(16, "little", signed=True)
        return b"\x8a\x10" + raw

    def numbers(entries: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, entries)) + b"t"

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(numel) + b"tQ"
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    view = storage + number(offset) + numbers(size) + numbers(stride) + hooks
    return b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + view + b"tRs."


NESTED = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


DOUBLED = b"\x80\x02]" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(80)) + b"."


CYCLE = b"\x80\x02]q\x00h\x00a."
