"""Checkpoints for the reader's tests: written by torch itself, or assembled item by item to be wrong."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("ATEN_CPU_CAPABILITY", "default")

import torch
import torch.distributed.checkpoint as dcp
from shardproof.models import BufferSpec, ModelSpec, ModuleSpec, ParamSpec
from shardproof.readers.description import Row, check_complete, describe
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

STATE: dict[str, Any] = {
    "model": {"a.weight": torch.arange(6.0).reshape(3, 2), "a.count": torch.tensor(7)},
    "optim": {
        "state": {"a.weight": {"step": torch.tensor(2.0), "exp_avg": torch.ones(3, 2, dtype=torch.bfloat16)}},
        "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "nesterov": True, "foreach": None, "params": ["a.weight"]}],
    },
    "extra": {
        "iteration": 2,
        "scheduler": {"last_epoch": 2, "_last_lr": [0.5, 0.25]},
        "scaler": {"scale": 8.0, "_growth_tracker": 1},
    },
}


def accept(path: Path) -> list[Row]:
    """The rows of a checkpoint that is complete: what `shardproof inspect` shows with exit status 0."""
    rows = describe(path)
    check_complete(path, rows)
    return rows


def save_dcp(state: dict[str, Any], path: Path) -> Path:
    """One process, torch's own writer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def save_full(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's elements, row-major, little endian."""
    if not tensor.numel():
        return b""
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def edit_metadata(path: Path, edit: Callable[[Metadata], None]) -> Path:
    """Rewrite `.metadata` of a checkpoint that torch wrote."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    return path


def replace_item(path: Path, key: str, payload: bytes) -> Path:
    """Store other bytes under a key, at the end of its file."""

    def edit(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == key)
        file = path / metadata.storage_data[index].relative_path
        content = file.read_bytes()
        file.write_bytes(content + payload)
        metadata.storage_data[index] = _StorageInfo(file.name, len(content), len(payload))

    return edit_metadata(path, edit)


def write_chunks(
    path: Path, key: str, whole: torch.Tensor, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Path:
    """A distributed checkpoint of one tensor, whose box number i rank i wrote."""
    path.mkdir(parents=True)
    chunks, storage = [], {}
    for rank, (start, size) in enumerate(boxes):
        piece = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].clone()
        payload = saved(piece)
        (path / f"__{rank}_0.distcp").write_bytes(payload)
        chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(size)))
        storage[MetadataIndex(key, start)] = _StorageInfo(f"__{rank}_0.distcp", 0, len(payload))
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    metadata = Metadata({key: entry}, {key: tuple(key.split("."))}, storage)
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    return path


class Touch:
    """Unpickling it creates a file: proof that something was executed."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


__all__ = ["BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"]

MODEL = ModelSpec(
    "tiny",
    "",
    (
        ModuleSpec(
            "a",
            (ParamSpec("weight", (3, 2)),),
            (BufferSpec("count", (), "int64"), BufferSpec("cache", (2,), persistent=False)),
        ),
    ),
)
"""A model that fits `STATE`."""
