"""`shardproof diff` on checkpoints larger than it may take of memory: sparse files, which cost no disk.

*Verifies*: the peak of a process that compares a gigabyte (at night, twenty) is below a bound that does not grow with
the size. *Does not verify*: time.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import checkpoint_samples as samples
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
BOUND_BYTES = 320 << 20
"""About 90 MB of Python, numpy and the command line itself, two pieces, and what differing elements take."""

CHILD = """
import re, sys
from shardproof.cli.main import entry
status = entry(sys.argv[1:])
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(status, peak_kib * 1024, file=sys.stderr)
"""
"""Not `getrusage`: what it says of a process that was just started is at least what its parent took."""


def diffed(*words: str) -> tuple[int, int, str]:
    """Exit status, peak of resident memory in bytes, and output of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "diff", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    status, peak = map(int, done.stderr.split()[-2:])
    return status, peak, done.stdout


def sparse_safetensors(path: Path, nbytes: int, tensors: int = 4) -> Path:
    """Tensors of zeros that together take so many bytes."""
    each = nbytes // tensors // 4096 * 4096
    header = {
        f"t{i}.weight": {"dtype": "F32", "shape": [each // 4096, 1024], "data_offsets": [each * i, each * (i + 1)]}
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + each * tensors)
    return path


def poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def zeros_crc(nbytes: int) -> int:
    crc, block = 0, bytes(1 << 20)
    for _ in range(nbytes // len(block)):
        crc = zlib.crc32(block, crc)
    return zlib.crc32(block[: nbytes % len(block)], crc)


def sparse_item(file: Path, tensor: torch.Tensor, nbytes: int) -> int:
    """Append an archive of torch.save of a float tensor of zeros, of which the storage is a hole. Its length."""
    begin = file.stat().st_size if file.exists() else 0
    pickled = samples.saved(tensor)
    start = pickled.index(b"PK\x03\x04")
    assert start == 0
    # the pickle names the size by itself: write one entry after the other as torch does, with a hole for the storage
    data_pkl = _pickle_of(pickled).replace(struct.pack("<i", tensor.numel()), struct.pack("<i", nbytes // 4))
    entries = [
        (b"archive/data.pkl", len(data_pkl), zlib.crc32(data_pkl)),
        (b"archive/data/0", nbytes, zeros_crc(nbytes)),
    ]
    with file.open("ab") as out:
        directory = b""
        for name, length, crc in entries:
            at = out.tell() - begin
            extra = struct.pack("<HHQQ", 1, 16, length, length)
            sizes = struct.pack("<III", crc, 0xFFFFFFFF, 0xFFFFFFFF)
            out.write(b"PK\x03\x04" + struct.pack("<HHHHH", 45, 0, 0, 0, 0) + sizes)
            out.write(struct.pack("<HH", len(name), len(extra)) + name + extra)
            if name.endswith(b".pkl"):
                out.write(data_pkl)
            else:
                out.truncate(out.tell() + length)
                out.seek(0, os.SEEK_END)
            extra = struct.pack("<HHQQQ", 1, 24, length, length, at)
            directory += b"PK\x01\x02" + struct.pack("<HHHHHH", 45, 45, 0, 0, 0, 0) + sizes
            directory += struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, 0xFFFFFFFF) + name + extra
        at = out.tell() - begin
        out.write(directory)
        end = out.tell() - begin
        out.write(b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 2, 2, len(directory), at))
        out.write(b"PK\x06\x07" + struct.pack("<IQI", 0, end, 1))
        out.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 2, 2, 0xFFFFFFFF, 0xFFFFFFFF, 0))
        return out.tell() - begin


def _pickle_of(archive: bytes) -> bytes:
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))


def sparse_dcp(path: Path, nbytes: int, ranks: int) -> Path:
    """A distributed checkpoint of one flat tensor of zeros, of which each rank wrote an equal part."""
    path.mkdir()
    each = nbytes // ranks // 4
    chunks, storage = [], {}
    for rank in range(ranks):
        file = path / f"__{rank}_0.distcp"
        length = sparse_item(file, torch.zeros(70_001), 4 * each)
        chunks.append(samples.ChunkStorageMetadata(torch.Size([rank * each]), torch.Size([each])))
        storage[samples.MetadataIndex("model.w", (rank * each,))] = _StorageInfo(file.name, 0, length)
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([ranks * each]), chunks)
    metadata = Metadata({"model.w": entry}, {"model.w": ("model", "w")}, storage)
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    return path


@pytest.mark.nightly
def test_a_gigabyte_is_compared_in_little_memory(tmp_path: Path) -> None:
    a = sparse_safetensors(tmp_path / "a.safetensors", GIB)
    b = sparse_safetensors(tmp_path / "b.safetensors", GIB)
    status, peak, output = diffed(str(a), str(b))
    assert (status, "equal: 4 names" in output) == (0, True)
    assert peak < BOUND_BYTES, peak
    poke(b, b.stat().st_size - 4, b"\0\0\x80\x3f")
    status, peak, output = diffed(str(a), str(b))
    assert status == 1
    assert "t3.weight" in output
    assert "first: A 0 (0x00000000), B 1 (0x3f800000)" in output
    assert peak < BOUND_BYTES, peak


def test_memory_stays_small_where_everything_differs(tmp_path: Path) -> None:
    a = sparse_safetensors(tmp_path / "a.safetensors", 128 << 20, tensors=1)
    b = sparse_safetensors(tmp_path / "b.safetensors", 128 << 20, tensors=1)
    begin = b.stat().st_size - (128 << 20)
    for at in range(0, 128 << 20, 1 << 20):
        poke(b, begin + at, os.urandom(1 << 20))
    status, peak, output = diffed(str(a), str(b))
    assert (status, "elements, from [0, 0]" in output) == (1, True)
    assert peak < BOUND_BYTES, peak


@pytest.mark.parametrize("size", [32 << 20, pytest.param(256 << 20, marks=pytest.mark.nightly)])
def test_another_order_of_rows_is_found_in_little_memory(tmp_path: Path, size: int) -> None:
    a = sparse_safetensors(tmp_path / "a.safetensors", size, tensors=1)
    b = sparse_safetensors(tmp_path / "b.safetensors", size, tensors=1)
    rows, last = size // 4096, size // 4096 // 4 * 3
    for row in range(rows):  # each begins with its number; in B the last quarter comes first
        for path, place in ((a, row), (b, (row - last) % rows)):
            poke(path, path.stat().st_size - size + 4096 * place, struct.pack("<i", row))
    status, peak, output = diffed(str(a), str(b))
    assert status == 1
    assert f"along dim 0 in another order: {last} to {rows - 1}, then 0 to {last - 1}." in output
    assert peak < BOUND_BYTES, peak


def test_shards_of_another_number_of_ranks_are_verified_and_put_together_in_little_memory(tmp_path: Path) -> None:
    a, b = sparse_dcp(tmp_path / "a", GIB // 2, 2), sparse_dcp(tmp_path / "b", GIB // 2, 4)
    status, peak, output = diffed(str(a), str(b))
    assert (status, "equal: 1 name, 134217728 elements" in output) == (0, True)
    assert peak < BOUND_BYTES, peak


@pytest.mark.nightly
def test_twenty_gigabytes_are_compared_in_as_little_memory(tmp_path: Path) -> None:
    a = sparse_safetensors(tmp_path / "a.safetensors", 20 * GIB, tensors=100)
    b = sparse_safetensors(tmp_path / "b.safetensors", 20 * GIB, tensors=100)
    poke(b, b.stat().st_size - 4, b"\0\0\x80\x3f")
    status, peak, output = diffed(str(a), str(b))
    assert (status, "t99.weight" in output) == (1, True)
    assert peak < BOUND_BYTES, peak
