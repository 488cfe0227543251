"""A recorded save as plain values: the folder before the save, and the file-system changes in order.

Paths are relative to the checkpoint's folder, with `/`; the folder itself is the empty path. An event that names a file
names it as it is called at that moment, so that a file which was renamed while it was open goes by its new name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Tree = Mapping[str, bytes | None]
"""Path → the bytes of a file, a `Link`, or None for a folder. Parents come with their children."""


class Link(bytes):
    """A symbolic link in the place of a file's bytes: the text that it leads to. Nobody follows it here, so that a link
    which leads out of the folder changes nothing there."""


Kind = Literal[
    "create",
    "mkdir",
    "symlink",
    "link",
    "rename",
    "unlink",
    "rmdir",
    "write",
    "truncate",
    "sync_file",
    "sync_dir",
    "sync_all",
]


@dataclass(frozen=True)
class Event:
    """One change of the file system, or one sync.

    Attributes:
        path: what is changed or synced; of a rename or a link, the name that was there before.
        target: the new name of a rename or a link.
        offset: where a write begins, in bytes; the new size of a truncation.
        data: what is written; the text that a symbolic link leads to.
    """

    kind: Kind
    path: str
    target: str = ""
    offset: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        match self.kind:
            case "write":
                return f"write {self.path} {self.offset}+{len(self.data)}"
            case "truncate":
                return f"truncate {self.path} to {self.offset}"
            case "symlink":
                return f"symlink {self.path} to {os.fsdecode(self.data)}"
            case "rename" | "link":
                return f"{self.kind} {self.path} to {self.target}"
            case kind:
                return f"{kind} {self.path or '.'}"


@dataclass(frozen=True)
class Call:
    """A system call as strace finds it again: which one, on which file, and the how manieth of its thread.

    Attributes:
        name: of the system call.
        path: what it names, relative to the checkpoint's folder.
        nth: how many calls of that name the thread had made on that path, this one included.
        rank: of the process that made it; 0 where a stack is one process.
        stage: between which collectives of the save it was made. Within a stage ranks do not wait for each other.
    """

    name: str
    path: str
    nth: int
    rank: int = 0
    stage: int = 0


@dataclass(frozen=True)
class Trace:
    """A save as it was recorded: the folder before it, taken to be wholly on disk, and the events in order.

    calls: the system call behind each event; empty where nobody asks for them.
    """

    base: Tree
    events: tuple[Event, ...]
    calls: tuple[Call, ...] = ()


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """What a folder holds now."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = Link(os.fsencode(path.readlink()))
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


def write_tree(tree: Tree, folder: Path) -> None:
    """Create a folder with the files and subfolders of a tree. The folder must not exist yet."""
    folder.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, Link):
                (folder / path).symlink_to(os.fsdecode(data))
            else:
                (folder / path).write_bytes(data)


def digest_of(tree: Tree) -> bytes:
    """A digest by which equal trees are told."""
    found = hashlib.blake2b(digest_size=16)
    for path, data in sorted(tree.items()):
        sign = b"@" if isinstance(data, Link) else b"="
        content = b"/" if data is None else sign + hashlib.blake2b(data, digest_size=16).digest()
        found.update(path.encode("utf-8", "surrogateescape") + b"\0" + content)
    return found.digest()


def describe(trace: Trace) -> str:
    """The events as numbered lines, with the rank of each where there are several."""
    ranks = [call.rank for call in trace.calls]
    told = [f"rank {rank}  " for rank in ranks] if any(ranks) else [""] * len(trace.events)
    return "".join(
        f"{number:4d}  {rank}{event}\n" for number, (rank, event) in enumerate(zip(told, trace.events, strict=True))
    )
