"""A checkpoint's keys as a table, for `shardproof inspect`, and the check that a checkpoint is complete.

*Verifies*: that the chunks of each tensor cover it, each element once; that keys are distinct. *Does not verify*: which
keys a model needs, nor any value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from pathlib import Path

import numpy as np

from shardproof.observe.record import ITEMSIZE
from shardproof.readers.errors import bad
from shardproof.readers.pieces import FULL_FILE, ObjectPiece, Piece, TensorPiece, key_of, pieces

DIGITS = 12
"""So many hex digits of a SHA-256 tell one value from another."""


@dataclass(frozen=True, slots=True)
class Row:
    """One key of a checkpoint.

    * kind: `tensor` or `object`.
    * dtype: of a tensor; an object's type otherwise.
    * chunks: number of pieces.
    * coverage: `ok`, `gap` or `overlap`.
    * digest: hex digits of the SHA-256 of the whole tensor's bytes, or of an object's text; empty where chunks
      do not cover it.
    * value: an object's text, shortened.
    """

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    coverage: str
    digest: str
    value: str = ""


def describe(path: Path) -> list[Row]:
    """Every key of a checkpoint, by name; holds one tensor at a time.

    Raises:
        CheckpointError: missing, truncated, foreign, inconsistent or hostile; a gap or overlap is a row, not an error.
    """
    rows = [_row(key_of(key), list(group)) for key, group in groupby(pieces(path), key=lambda piece: piece.path)]
    return sorted(rows, key=lambda row: row.key)


def is_foreign(path: Path) -> bool:
    """Whether a path holds something else than a file of torch.save or a folder of torch's distributed checkpoint."""
    if path.is_dir():
        return not (path / ".metadata").exists() and any(path.iterdir())
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(2) != b"PK"


def beside(path: Path) -> tuple[str, ...]:
    """The files in a folder of which `describe` reads nothing."""
    if not path.is_dir():
        return ()
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    whole = path / FULL_FILE
    read = [whole] if whole.is_file() else [file for file in files if file.name.endswith((".metadata", ".distcp"))]
    return tuple(str(file.relative_to(path)) for file in files if file not in read)


def check_complete(path: Path, rows: Sequence[Row]) -> None:
    """Refuse what `describe` only reports.

    Raises:
        CheckpointError: chunks leave a gap or overlap, a key occurs twice, or there is nothing at all.
    """
    form = "a complete checkpoint, written once"
    if not rows:
        raise bad(f"{path}: number of keys", 0, "1 or more", form)
    for row in rows:
        if row.coverage != "ok":
            raise bad(f"{path}: chunks of {row.key!r}", row.coverage, f"every element of {row.shape} once", form)
    for before, row in pairwise(rows):  # sorted by key
        if before.key == row.key:
            raise bad(f"{path}: key", row.key, "every key once", form)


def render_description(rows: Iterable[Row]) -> str:
    """The rows as an aligned plain-text table; characters that a terminal would obey are escaped."""
    head = ("key", "dtype", "shape", "chunks", "coverage", "sha256", "value")
    cells = [head]
    for row in rows:
        shape = "×".join(map(str, row.shape)) if row.shape else "scalar" if row.kind == "tensor" else ""
        cells.append((_printable(row.key), row.dtype, shape, str(row.chunks), row.coverage, row.digest, row.value))
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return "".join("  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in cells)


def _row(key: str, group: list[Piece]) -> Row:
    first = group[0]
    if isinstance(first, ObjectPiece):
        return row_of_plain(key, first.value, len(group))
    alike = [p for p in group if isinstance(p, TensorPiece) and (p.dtype, p.shape) == (first.dtype, first.shape)]
    coverage, data = _join(first, alike) if len(alike) == len(group) else ("overlap", None)
    return Row(key, "tensor", first.dtype, first.shape, len(group), coverage, "" if data is None else _digest(data))


def row_of_plain(key: str, value: object, chunks: int = 1) -> Row:
    """The row of what is no tensor; chunks: how many pieces claim the key, of which one alone is sound."""
    text = repr(value)
    shown = _printable(text if len(text) <= 40 else f"{text[:39]}…")
    return Row(key, "object", type(value).__name__, (), chunks, "ok" if chunks == 1 else "overlap",
               _digest(text.encode()), shown)  # fmt: skip


def _join(first: TensorPiece, chunks: list[TensorPiece]) -> tuple[str, bytes | None]:
    """How chunks of one tensor cover it, and its bytes if they do. Nothing larger than the chunks is allocated."""
    total = sum(prod(chunk.size) for chunk in chunks)
    if total != prod(first.shape):
        return "gap" if total < prod(first.shape) else "overlap", None
    if total == 0:
        return "ok", b""
    tensor = np.zeros(first.shape, f"V{ITEMSIZE[first.dtype]}")
    covered = np.zeros(first.shape, np.bool_)
    for chunk in chunks:
        box = tuple(slice(at, at + n) for at, n in zip(chunk.start, chunk.size, strict=True))
        if covered[box].any():
            return "overlap", None
        tensor[box] = np.frombuffer(chunk.data, tensor.dtype).reshape(chunk.size)
        covered[box] = True
    return "ok", tensor.tobytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
