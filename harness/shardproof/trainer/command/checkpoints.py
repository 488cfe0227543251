"""The checkpoints in a folder that a command wrote: which is the newest, and what differs between two.

A checkpoint is a folder or some files whose names have the number of a step, such as `checkpoint-4`, `global_step4`,
`iter_0000004`, `epoch=0-step=4.ckpt`, or `model_step4.pt` beside `optim_step4.pt`. Where nothing has such a name, the
folder as a whole is one checkpoint.

*Verifies*: what the readers of `shardproof diff` find in all files, bit for bit; nothing in a file is executed. *Does
not verify*: files of other formats, whose bytes are compared, and which are listed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardproof.compare.contents import Contents, Tensor
from shardproof.compare.differences import EntryDifference
from shardproof.compare.files import Files
from shardproof.compare.formats import SAVED, add_everything, open_contents
from shardproof.compare.progress import SilentProgress
from shardproof.compare.roles import role_of
from shardproof.compare.run import CompareRequest, compare
from shardproof.errors import UsageError
from shardproof.protocol.checkpoint_layout import Layout
from shardproof.protocol.registry import all_systems

_NUMBERED = re.compile(
    r"(?:^|[^a-z])(?:(?P<step>(?:global[-_]?)?step|iteration|iter|update)|checkpoint|ckpt|epoch)s?[-_=]?(?P<number>\d+)",
    re.IGNORECASE,
)
_POINTER = re.compile(r"(?:latest|last|newest)(?:[-_.]\w+)*", re.IGNORECASE)
"""Names of files and links that lead to the newest checkpoint, such as `latest_checkpointed_iteration.txt`."""
LONGEST_TARGET = 1 << 10
"""Bytes of a file that has nothing but the name of a checkpoint in it."""
DEEPEST = 4
"""How deep below the folder of a run numbered checkpoints are looked for."""
TRAINED = ("param", "master", "exp_avg", "exp_avg_sq", "momentum", "tensor")
"""Roles of tensors that every step changes, and of those whose names do not tell."""
UPPER_BIT = {"fp32": (2, 0x40), "bf16": (0, 0x40), "fp16": (1, 0x02), "fp64": (6, 0x08)}
"""The upper bit of the mantissa: in which byte of an element it lies, and which bit of that byte it is."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. number: in its name; None where no name has one. folder: what names in it are relative to. paths:
    the folders and files that it is made of."""

    number: int | None
    folder: Path
    paths: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """What a script is given to resume from: a numbered folder, else the one file, or the folder of several."""
        one_file = len(self.paths) == 1 and number_of(self.folder.name) != self.number
        return self.paths[0] if one_file else self.folder


@dataclass(frozen=True)
class Pointer:
    """A file or symbolic link, such as `latest`, that leads to a checkpoint. target: that one's name, or its number.
    is_there: whether the run's folder has it."""

    name: str
    target: str
    is_there: bool


@dataclass(frozen=True)
class Compared:
    """What two checkpoints have in common. names: how many were compared. unread: files that nobody reads, of other
    bytes. why: why nothing could be compared; else empty. sides: where the expected one is, and the found."""

    found: tuple[EntryDifference, ...] = ()
    names: int = 0
    unread: tuple[str, ...] = ()
    why: str = ""
    sides: tuple[Path, Path] = (Path(), Path())


def number_of(name: str) -> int | None:
    """The step in a name; its epoch, or whatever else is counted, where it has no step."""
    found = list(_NUMBERED.finditer(name))
    steps = [one for one in found if one["step"]]
    return int((steps or found)[-1]["number"]) if found else None


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The numbered checkpoints of a run, the newest last; the whole folder where there are none, and nothing where it
    is empty."""
    level = [folder]
    for _ in range(DEEPEST):
        found: dict[tuple[int, Path], list[Path]] = {}
        for path in (path for parent in level for path in sorted(parent.iterdir()) if not path.is_symlink()):
            number = number_of(path.name)
            if number is not None and (path.is_dir() or path.suffix in (*SAVED, ".safetensors")):
                found.setdefault((number, path.parent), []).append(path)
        if found:
            return [_checkpoint(number, parent, found[number, parent]) for number, parent in sorted(found)]
        level = [path for parent in level for path in sorted(parent.iterdir()) if path.is_dir()
                 and not path.is_symlink()]  # fmt: skip
    return [Checkpoint(None, folder, tuple(sorted(folder.iterdir())))] if any(folder.iterdir()) else []


def pointers_elsewhere(folder: Path) -> list[Pointer]:
    """The pointers in a run's folder that lead to another numbered checkpoint than the newest."""
    numbered = [one for one in checkpoints_in(folder) if one.number is not None]
    if not numbered:
        return []
    newest, numbers = numbered[-1], {one.number for one in numbered}
    beside = newest.folder.parent if number_of(newest.folder.name) == newest.number else newest.folder
    found = []
    for path in (path for each in sorted({folder, beside}) for path in sorted(each.iterdir())):
        target = _target(path) if _POINTER.fullmatch(path.name) else ""
        number = int(target) if target.isdecimal() else number_of(target)
        is_there = number in numbers
        if number not in (None, newest.number) and (is_there or not target.isdecimal()):
            found.append(Pointer(path.name, target, is_there))
    return found


def _target(path: Path) -> str:
    """The name, or the bare number, that a symbolic link or a short text file has of something else; else empty."""
    if path.is_symlink():
        return path.readlink().name
    if not path.is_file() or path.stat().st_size > LONGEST_TARGET:
        return ""
    return Path(path.read_bytes().decode("utf-8", "replace").strip()).name


def _checkpoint(number: int, parent: Path, paths: list[Path]) -> Checkpoint:
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else parent
    return Checkpoint(number, folder, tuple(sorted(folder.iterdir())) if folder != parent else tuple(paths))


@dataclass
class _Everything:
    """A layout of `shardproof diff` that takes up every file of two checkpoints."""

    paths: dict[Path, tuple[Path, ...]]
    layouts: tuple[Layout[Any], ...] = field(default_factory=lambda: _layouts())
    unread: list[Path] = field(default_factory=list)

    def recognises(self, folder: Path) -> bool:
        """Whether the folder is one of the two checkpoints."""
        return folder in self.paths

    def add(self, contents: Contents, folder: Path) -> str:
        """Take up every file of the checkpoint in a folder; the names of the formats."""
        self.unread += add_everything(contents, self.paths[folder], self.layouts)
        return contents.form


def _layouts() -> tuple[Layout[Any], ...]:
    return tuple(layout for system in all_systems() for layout in system.layouts)


def compared(expected: Checkpoint, observed: Checkpoint) -> Compared:
    """What differs between two checkpoints; A of a difference is what was expected."""
    everything = _Everything({one.folder: one.paths for one in (expected, observed)})
    sides = expected.path, observed.path
    try:
        found = compare(CompareRequest(expected.folder, observed.folder, [everything]), SilentProgress())
    except UsageError as error:
        if expected is not observed and not compared(expected, expected).why:
            return Compared((EntryDifference("the checkpoint", "file", "kind", detail=str(error)),), 1, sides=sides)
        return Compared(unread=_other_bytes(expected, observed, None), why=str(error))
    unread = {path.relative_to(folder) for path in everything.unread for folder in everything.paths
              if path.is_relative_to(folder)}  # fmt: skip
    names = sum(found.compared.values())
    return Compared(found.found, names, _other_bytes(expected, observed, unread), sides=sides)


def unchanged(earlier: Checkpoint, later: Checkpoint) -> list[tuple[str, str, int]]:
    """What training should change, and two checkpoints of one run have alike: for each file and role of which no tensor
    of floats differs, the two, and how many tensors that is. Nothing where a reader refuses one of the checkpoints."""
    everything = _Everything({one.folder: one.paths for one in (earlier, later)})
    groups: dict[tuple[str, str], list[bool]] = {}
    try:
        found = compare(CompareRequest(earlier.path, later.path, [everything]), SilentProgress())
        contents = open_contents(later.path, [everything], lambda count: None, checksums=False)
    except UsageError:
        return []
    contents.files.close()
    differing = {one.name for one in found.found}
    for name, tensor in contents.tensors.items():
        role = role_of(tensor.path, tensor=True)
        if tensor.numel > 1 and tensor.dtype in UPPER_BIT and tensor.parts and role in TRAINED:
            file = Path(tensor.parts[0].place[0]).name
            groups.setdefault((file, role), []).append(name not in differing)
    return [(*group, len(alike)) for group, alike in sorted(groups.items()) if all(alike)]


def _other_bytes(expected: Checkpoint, observed: Checkpoint, among: Iterable[Path] | None) -> tuple[str, ...]:
    """The names of files that are not in both checkpoints with the same bytes."""
    one, other = _files(expected), _files(observed)
    names = {*one, *other} if among is None else {*among} & {*one, *other}
    return tuple(
        sorted(
            str(name)
            for name in names
            if name not in one or name not in other or one[name].read_bytes() != other[name].read_bytes()
        )
    )


def _files(checkpoint: Checkpoint) -> dict[Path, Path]:
    inside = (below for path in checkpoint.paths for below in (path, *(path.rglob("*") if path.is_dir() else ())))
    return {path.relative_to(checkpoint.folder): path for path in inside if path.is_file() and not path.is_symlink()}


def change_values(folder: Path) -> None:
    """Change one element of every tensor of floats in a folder, by the upper bit of its mantissa. A tensor of one
    element stays, since it may be a count of steps, by which a script stops.

    No reader can see that anything is wrong with such a file, apart from those that verify checksums.
    """
    contents = Contents(folder, Files(folder, lambda count: None), checksums=False)
    places: set[tuple[Path, int, int]] = set()
    try:
        add_everything(contents, sorted(folder.iterdir()), _layouts())
        for tensor in contents.tensors.values():
            if tensor.numel > 1:
                places.update(_first_element(tensor))
    finally:
        contents.files.close()
    for path, at, bit in {(path.resolve(), at, bit) for path, at, bit in places}:
        if not path.is_relative_to(folder.resolve()):
            continue  # a symbolic link leads out of the folder
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ bit]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # by which some scripts find the newest


def _first_element(tensor: Tensor) -> Iterator[tuple[Path, int, int]]:
    """File, byte and bit of the first stored element of a tensor that has one."""
    part = next((part for part in tensor.parts if all(part.size)), None)
    if part is not None and tensor.dtype in UPPER_BIT:
        view = part.opened()
        byte, bit = UPPER_BIT[view.dtype]
        size = {"fp64": 8, "fp32": 4}.get(view.dtype, 2)
        yield view.extent.path, view.extent.start + view.offset * size + byte, bit
