"""What two checkpoints of a trainer do not have in common, as `shardproof diff` finds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardproof.compare.differences import EntryDifference
from shardproof.compare.formats import open_contents
from shardproof.compare.misplaced import read_all
from shardproof.compare.progress import SilentProgress
from shardproof.compare.run import CompareRequest, compare
from shardproof.diagnosis.arrangement import DISTINCT
from shardproof.diff import STRUCTURE, Difference, as_numbers
from shardproof.errors import UsageError
from shardproof.observe.logical import Key, Value
from shardproof.protocol.checkpoint_layout import Layout
from shardproof.protocol.registry import all_systems

MOST_BYTES = 64 << 20
"""Of a tensor that is read whole."""


def differing(first: Path, second: Path) -> tuple[EntryDifference, ...]:
    """The entries in which two folders' checkpoints differ.

    Raises:
        UsageError: nothing here reads this form of checkpoint.
    """
    return tuple(compare(CompareRequest(_file_of(first), _file_of(second), _layouts()), SilentProgress()).found)


def names_in(folder: Path) -> tuple[str, ...]:
    """The names of all tensors and plain values in a folder's checkpoint; none where nothing here reads its form."""
    file = _file_of(folder)
    try:
        contents = open_contents(file, _layouts(), lambda _: None, checksums=False, beside=file.is_dir())
    except UsageError:
        return ()
    contents.files.close()
    return tuple(contents.entries)


def held_under(folder: Path, values: Mapping[str, Value]) -> dict[str, str]:
    """Name of a value → the name under which a folder's checkpoint has all of its bits, where it is another one.

    A value of one number alone, such as zeros, is not looked for, since any other may have the same.
    """
    wanted = {name: value for name, value in values.items() if len(set(as_numbers(value).tolist())) >= DISTINCT}
    file = _file_of(folder)
    if not wanted or not folder.is_dir():
        return {}
    try:
        contents = open_contents(file, _layouts(), lambda _: None, checksums=False, beside=file.is_dir())
    except UsageError:
        return {}
    found = dict[str, str]()
    try:
        for name, value in wanted.items():
            alike = (other for other, tensor in contents.tensors.items()
                     if (tensor.dtype, tensor.shape) == (value.dtype, value.shape) and tensor.nbytes <= MOST_BYTES
                     and read_all(tensor).tobytes() == value.data)  # fmt: skip
            if other := next(alike, None):
                found[name] = other
    finally:
        contents.files.close()
    return {name: other for name, other in found.items() if name != other}


def _layouts() -> list[Layout[Any]]:
    """The kinds of checkpoint folders that `shardproof diff` knows."""
    return [layout for system in all_systems() for layout in system.layouts]


def as_difference(one: EntryDifference, op: int) -> Difference:
    """What two checkpoints do not have in common, as a difference of the operation that wrote the second one."""
    kind, total = one.kind if one.kind in STRUCTURE else "bits", max(1, one.total)
    return Difference(Key(op, "written", one.role, one.name), kind, mismatched=one.mismatched or total, total=total)


def _file_of(folder: Path) -> Path:
    """The file of a folder that has one file and nothing else; the folder itself otherwise."""
    inside = list(folder.iterdir()) if folder.is_dir() else []
    return inside[0] if len(inside) == 1 else folder
