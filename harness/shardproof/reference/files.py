"""The reference's checkpoints on disk: written atomically, and refused on reading if a single byte has changed.

    RUN                      the id of the training run whose checkpoints lie here
    gen-00000007/            one checkpoint, the seventh
        rank_0.bin           what rank 0 wrote: bytes of arrays, one behind the other
        common.bin           what is the same on every rank
        MANIFEST             everything else, as JSON, with a digest of itself as its last line

The manifest names format, run and generation, every file with its size, every array with its file, dtype, shape and
SHA-256, and the tree of names and plain values in which the arrays hang. An array's digest is taken over run,
generation, place in the tree, dtype, shape and bytes, so that an array of another place, step or run does not fit.

`write` takes these steps. 1. Everything goes into a new folder `new-00000007`, each file is synced, then the folder.
2. Everything is read back from there and compared with its digests. 3. The folder is renamed to `gen-00000007` and its
parent synced: this one step is the commit. 4. The generation before the last is renamed to `old-…` and removed. A crash
before step 3 leaves a folder that no reader looks at and that the next save removes.

`read` takes the highest generation and refuses it if anything is missing, too many, or different. It never falls back
to an older generation by itself: after the commit no crash can damage one, so that damage is a reason to look.
The error names the older generations; `read(…, generation=6)` reads one of them.

Arrays are written, digested and read in chunks of a mebibyte, and sizes are checked against the sizes of files before
memory is taken, so that neither needs more than the content itself and one chunk.

*Does not verify*: that somebody who means harm did not write the digests anew with the bytes. That needs a key.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardproof.codec import from_plain, to_plain
from shardproof.reference.checkpoint import Content
from shardproof.reference.kernels import Hyper
from shardproof.reference.numerics import DTYPE, NAME, Array

FORMAT = "shardproof reference checkpoint 1"
CHUNK = 1 << 20
MOST_OF_A_MANIFEST = 64 << 20
KEPT = 2
"""So many generations stay: the new one, and the one before."""

_DEEPEST = 64
_GENERATION = re.compile(r"gen-(\d{8})")
_RANK = re.compile(r"rank_\d+")


class DamagedError(Exception):
    """A checkpoint is not what was written: something is missing, too many, or different."""


@dataclass(frozen=True)
class _Entry:
    """One array in the manifest; `at` is its offset in its file, in bytes."""

    file: str
    at: int
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    format: str
    run: str
    generation: int
    sizes: dict[str, int]
    arrays: tuple[_Entry, ...]
    tree: Any


def write(folder: Path, content: Content, generation: int, run: str) -> Path:
    """Commit a checkpoint as the next generation of a folder, which is made if it is not there.

    Returns:
        The folder of the generation.

    Raises:
        DamagedError: the folder belongs to another run, its generations are as new as this one, or what was read back
            is not what was written. OSError: as the system says.
    """
    _claim(folder, run)
    there = generations(folder)
    if there and there[-1] >= generation:
        raise DamagedError(f"{folder} has generation {there[-1]}; {generation} is not newer")
    for left in [*folder.glob("new-*"), *folder.glob("old-*")]:
        shutil.rmtree(left)
    new, final = folder / f"new-{generation:08d}", folder / f"gen-{generation:08d}"
    new.mkdir()
    _fill(new, content, generation, run)
    _sync(new)
    _read_generation(new, generation, run, keep=False)
    os.rename(new, final)
    _sync(folder)
    for number in there[: 1 - KEPT]:
        old = folder / f"old-{number:08d}"
        os.rename(folder / f"gen-{number:08d}", old)
        _sync(folder)
        shutil.rmtree(old)
    return final


def read(folder: Path, generation: int | None = None) -> tuple[int, Content]:
    """A generation of a folder, the newest by default, and its number.

    Raises:
        DamagedError: there is none, or it is not what was written. OSError: as the system says.
    """
    run = _run_of(folder)
    there = generations(folder)
    if not there:
        raise DamagedError(f"no checkpoint was committed to {folder}")
    number = there[-1] if generation is None else generation
    try:
        return number, _read_generation(folder / f"gen-{number:08d}", number, run, keep=True)
    except (DamagedError, FileNotFoundError) as error:
        others = ", ".join(str(one) for one in there if one != number) or "none"
        raise DamagedError(f"generation {number} of {folder} is damaged: {error}; others there: {others}") from error


def generations(folder: Path) -> list[int]:
    """The committed generations of a folder, the oldest first."""
    found = (_GENERATION.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


# -- writing


def _claim(folder: Path, run: str) -> None:
    """Mark a folder as belonging to a training run, or raise if another run's mark is found in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "RUN").exists():
        if (other := _run_of(folder)) != run:
            raise DamagedError(f"{folder} holds checkpoints of run {other!r}, not of {run!r}")
        return
    with _created(folder / "RUN.new") as file:
        file.write(_sealed(json.dumps({"format": FORMAT, "run": run}).encode()))
    os.rename(folder / "RUN.new", folder / "RUN")
    _sync(folder)
    _sync(folder.parent)


def _fill(new: Path, content: Content, generation: int, run: str) -> None:
    """Write the files of a generation, the manifest last."""
    arrays: list[tuple[str, str, Array]] = []
    tree = _flattened(content, (), arrays)
    entries: list[_Entry | None] = [None] * len(arrays)
    sizes: dict[str, int] = {}
    for name in sorted({file for file, _, _ in arrays}):
        with _created(new / name) as file:
            for index, (own, place, values) in enumerate(arrays):
                if own == name:
                    at, dtype = file.tell(), NAME[values.dtype]
                    digest = _digest_of(run, generation, place, dtype, values.shape)
                    for chunk in _chunks(values):
                        digest.update(chunk)
                        file.write(chunk)
                    entries[index] = _Entry(name, at, dtype, values.shape, digest.hexdigest())
            sizes[name] = file.tell()
    manifest = _Manifest(FORMAT, run, generation, sizes, tuple(entry for entry in entries if entry), tree)
    with _created(new / "MANIFEST") as file:
        file.write(_sealed(json.dumps(to_plain(manifest)).encode()))


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """A new file, which is on disk when the block ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that what is read back comes from the disk


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sealed(text: bytes) -> bytes:
    return text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def _chunks(values: Array) -> Iterator[memoryview]:
    data = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    for at in range(0, len(data), CHUNK):
        yield data[at : at + CHUNK]


def _digest_of(run: str, generation: int, place: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """A digest that has seen everything of an array but its bytes."""
    return hashlib.sha256(repr((FORMAT, run, generation, place, dtype, shape)).encode() + b"\n")


def _flattened(value: Any, place: tuple[str, ...], arrays: list[tuple[str, str, Array]]) -> Any:
    """A value as JSON, with every array and bytes moved to `arrays` under its file and its place."""

    def moved(kind: str, data: Array) -> Any:
        file = next((name for name in place if _RANK.fullmatch(name)), "common")
        arrays.append((f"{file}.bin", "/".join(place), data))
        return {kind: len(arrays) - 1}

    match value:
        case np.ndarray() | np.generic():
            return moved("array", np.asarray(value))
        case bytes():
            return moved("bytes", np.frombuffer(value, np.uint8))
        case dict():
            return {"dict": [[key, _flattened(item, (*place, str(key)), arrays)] for key, item in value.items()]}
        case tuple() | list():
            items = [_flattened(item, (*place, str(index)), arrays) for index, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        case Hyper():
            return {"hyper": to_plain(value)}
        case float():
            return {"float": value.hex()}
        case None | bool() | int() | str():
            return {"plain": value}
        case other:
            raise TypeError(f"a checkpoint cannot hold a {type(other).__name__}")


# -- reading


def _run_of(folder: Path) -> str:
    found = _opened(folder / "RUN")
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("run"), str):
        raise DamagedError(f"{folder / 'RUN'} is not of the form {FORMAT!r}")
    return str(found["run"])


def _opened(path: Path) -> Any:
    """The JSON of a file with a digest of itself as its last line."""
    if path.stat().st_size > MOST_OF_A_MANIFEST:
        raise DamagedError(f"{path.name} is larger than any that is written")
    data = path.read_bytes()
    text = data[: -(2 + hashlib.sha256().digest_size * 2)]
    if data != _sealed(text):
        raise DamagedError(f"{path.name} does not have the digest that it was written with")
    return json.loads(text)


def _read_generation(folder: Path, generation: int, run: str, keep: bool) -> Content:
    """All of a generation, each byte compared with its digest.

    Args:
        keep: make the content; without, it is compared only.
    """
    manifest = _manifest_of(folder, generation, run)
    wrong = {path.name for path in folder.iterdir()} ^ {*manifest.sizes, "MANIFEST"}
    if wrong:
        raise DamagedError(f"missing, or too many: {', '.join(sorted(wrong))}")
    places = dict(_places(manifest.tree, ()))
    if sorted(places) != list(range(len(manifest.arrays))):
        raise DamagedError("its arrays and its names do not belong together")
    arrays: dict[int, Array] = {}
    for name, size in manifest.sizes.items():
        with (folder / name).open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise DamagedError(f"{name} has {os.fstat(file.fileno()).st_size} bytes, and was written with {size}")
            own = [(entry.at, index) for index, entry in enumerate(manifest.arrays) if entry.file == name]
            for _, index in sorted(own):
                found = _read_array(file, manifest, manifest.arrays[index], places[index], keep)
                if found is not None:
                    arrays[index] = found
            if file.tell() != size:
                raise DamagedError(f"{name} has bytes that belong to no array")
    return _unflattened(manifest.tree, arrays) if keep else {}


def _manifest_of(folder: Path, generation: int, run: str) -> _Manifest:
    try:
        manifest: _Manifest = from_plain(_Manifest, _opened(folder / "MANIFEST"))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DamagedError(f"MANIFEST cannot be understood: {error}") from error
    for what, said, wanted in (
        ("format", manifest.format, FORMAT), ("run", manifest.run, run),
        ("generation", manifest.generation, generation),
    ):  # fmt: skip
        if said != wanted:
            raise DamagedError(f"MANIFEST is of {what} {said!r}, not {wanted!r}")
    return manifest


def _read_array(file: BinaryIO, manifest: _Manifest, entry: _Entry, place: str, keep: bool) -> Array | None:
    """Read one array of a checkpoint file and check its digest. The array must begin at the byte where the previous
    array ended."""
    if file.tell() != entry.at or entry.dtype not in DTYPE or any(size < 0 for size in entry.shape):
        raise DamagedError(f"{place}: its entry cannot be true")
    left = prod(entry.shape) * DTYPE[entry.dtype].itemsize
    if left > manifest.sizes[entry.file] - entry.at:
        raise DamagedError(f"{place}: {entry.file} is too short for it")
    digest = _digest_of(manifest.run, manifest.generation, place, entry.dtype, entry.shape)
    values = np.empty(left, np.uint8) if keep else None
    done = 0
    while done < left:
        chunk = file.read(min(CHUNK, left - done))
        if not chunk:
            raise DamagedError(f"{place}: {entry.file} ends early")
        digest.update(chunk)
        if values is not None:
            values[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
        done += len(chunk)
    if digest.hexdigest() != entry.sha256:
        raise DamagedError(f"{place} does not have the digest that it was written with")
    return None if values is None else values.view(DTYPE[entry.dtype]).reshape(entry.shape)


def _places(node: Any, place: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """`(index of an array, its place)` of a tree, as it was written."""
    kind, value = _of_one_kind(node, len(place))
    if kind in ("array", "bytes"):
        yield value, "/".join(place)
    elif kind == "dict":
        for key, item in value:
            yield from _places(item, (*place, str(key)))
    elif kind in ("tuple", "list"):
        for index, item in enumerate(value):
            yield from _places(item, (*place, str(index)))


def _unflattened(node: Any, arrays: dict[int, Array]) -> Any:
    kind, value = _of_one_kind(node, 0)
    match kind:
        case "array":
            return arrays[value]
        case "bytes":
            return arrays[value].tobytes()
        case "dict":
            return {key: _unflattened(item, arrays) for key, item in value}
        case "tuple":
            return tuple(_unflattened(item, arrays) for item in value)
        case "list":
            return [_unflattened(item, arrays) for item in value]
        case "hyper":
            return from_plain(Hyper, value)
        case "float":
            return float.fromhex(value)
        case "plain":
            return value
        case other:
            raise DamagedError(f"MANIFEST has a node of kind {other!r}")


def _of_one_kind(node: Any, depth: int) -> tuple[str, Any]:
    if not isinstance(node, dict) or len(node) != 1 or depth > _DEEPEST:
        raise DamagedError("MANIFEST has a node of no kind")
    return next(iter(node.items()))
