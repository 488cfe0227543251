"""The index of a checkpoint: for each name the stored value or tensor, and the files and offsets of the tensor's
pieces.

A `Tensor` is a whole one; its `Part`s are the boxes of it that are stored, one for each shard. A part is opened when it
is first read, since a large checkpoint has more shards than one wants to look into beforehand. For example, a weight of
8 × 4 that two ranks saved is one tensor with two parts, of rows 0 to 3 and of rows 4 to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.compare.dtypes import itemsize
from shardproof.compare.files import FORM, Extent, Files
from shardproof.compare.views import Ints, View
from shardproof.layout import interval_boxes
from shardproof.readers.errors import bad
from shardproof.readers.pieces import KeyPath, key_of
from shardproof.readers.values import Value

EXPANDED = 8
"""How many times the bytes of its files a checkpoint's tensors may come to: tensors share storages, and may repeat
elements of them (a stride of 0)."""

SMALL_BYTES = 1 << 30
"""What tensors may come to in any case."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stored box of a tensor. place: file and offset, which say in which order to read. opened: its view, of the
    box's size, and raises CheckpointError where there is none."""

    start: Ints
    size: Ints
    place: tuple[str, int]
    opened: Callable[[], View]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor under its name, with the parts that are stored of it."""

    path: KeyPath
    dtype: str
    shape: Ints
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Plain:
    """A value that is no tensor: a number, a text, a list of such."""

    path: KeyPath
    value: Value


Entry = Tensor | Plain


@dataclass
class Contents:
    """What one checkpoint holds.

    form: what kind of checkpoint it is, in words. foreign: names in its pickles that are no plain data; they were taken
    as text. extents: storages that several tensors may share.
    """

    path: Path
    files: Files
    checksums: bool = True
    form: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    extents: list[Extent] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        """Take an entry up.

        Raises:
            CheckpointError: there is one of that name.
        """
        name = key_of(entry.path)
        if name in self.entries:
            raise bad(f"{self.path}: name", name, "every name once", FORM)
        self.entries[name] = entry

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: entry for name, entry in self.entries.items() if isinstance(entry, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def require_something(self) -> None:
        """Check that there is an element to compare, and that the tensors are not absurdly larger than the files.

        Raises:
            CheckpointError: there is none, or they are.
        """
        if not any(tensor.numel for tensor in self.tensors.values()):
            raise bad(f"{self.path}: elements of tensors", 0, "1 or more, since nothing equals nothing", FORM)
        most = max(EXPANDED * self.files.total(), SMALL_BYTES)
        if self.nbytes > most:
            allowed = f"at most {most}, {EXPANDED} times the bytes of its files"
            raise bad(f"{self.path}: bytes of its tensors", self.nbytes, allowed, FORM)

    def finish(self) -> None:
        """Verify what is left of checksums, and that no file changed.

        Raises:
            CheckpointError: a checksum is wrong, or a file changed.
        """
        for extent in self.extents:
            extent.finish()
        self.files.require_unchanged()


class Reading:
    """Reads flat ranges of one tensor, as if its parts lay next to each other in order. The parts must cover it, each
    element once."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._views: dict[int, View] = {}
        grid = (len(tensor.parts), len(tensor.shape))
        self._starts = np.array([part.start for part in tensor.parts], np.int64).reshape(grid)
        self._ends = self._starts + np.array([part.size for part in tensor.parts], np.int64).reshape(grid)

    def read(self, first: int, into: npt.NDArray[Any]) -> None:
        """Fill `into`, shape (n,), with elements `first` to `first + n` of the flattened tensor, as bits.

        Raises:
            CheckpointError: a file is damaged.
        """
        position = 0
        for box in interval_boxes(self._tensor.shape, first, len(into)):
            target = into[position : position + box.volume].reshape(box.size)
            self._fill(box.start, target)
            position += box.volume

    def _fill(self, start: Ints, target: npt.NDArray[Any]) -> None:
        low, high = np.array(start, np.int64), np.array(start, np.int64) + np.array(target.shape, np.int64)
        touching = ((self._starts < high) & (self._ends > low)).all(axis=1)
        for index in np.flatnonzero(touching).tolist():
            begin, end = np.maximum(self._starts[index], low), np.minimum(self._ends[index], high)
            where: tuple[Any, ...] = tuple(
                slice(int(b - o), int(e - o)) for b, e, o in zip(begin, end, low, strict=True)
            )
            inner = tuple(int(b - s) for b, s in zip(begin, self._starts[index], strict=True))
            self._view(index).read(inner, target[(*where, ...)])

    def _view(self, index: int) -> View:
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = self._tensor.parts[index].opened()
        return view

    def finish(self) -> None:
        """Verify what is left of the checksums of storages that belong to this tensor alone.

        Raises:
            CheckpointError: one is wrong.
        """
        for view in self._views.values():
            view.extent.finish()


def whole(path: KeyPath, view: View) -> Tensor:
    """A tensor that is stored in one piece."""
    zeros = (0,) * len(view.shape)
    part = Part(zeros, view.shape, (str(view.extent.path), view.extent.start + view.offset), lambda: view)
    return Tensor(path, view.dtype, view.shape, (part,))


def flat_parts(
    shape: Ints, first: int, count: int, opened: Callable[[], View], at: int, place: tuple[str, int]
) -> Iterable[Part]:
    """The parts that a run of elements makes of a tensor.

    Args:
        shape: of the tensor. first, count: which elements of the flattened tensor are stored. opened: the stored flat
            tensor, in which they begin at element `at`.
    """
    position = at
    for box in interval_boxes(shape, first, count):
        yield Part(box.start, box.size, (place[0], place[1] + position), _cut(opened, position, box.size))
        position += box.volume


def _cut(opened: Callable[[], View], at: int, size: Ints) -> Callable[[], View]:
    return lambda: opened().flat(at, size)
