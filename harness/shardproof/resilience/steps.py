"""Turns recorded events on paths into steps on numbered files and folders, and computes what a set of steps leaves on
disk.

A name in a folder and the bytes of a file are kept apart, as a file system keeps them apart: a file may have its name
on disk without its bytes, or its bytes without its name. Folder 0 is the checkpoint's. Every other file and folder gets
the next number when it is first seen, those of the base tree first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardproof.resilience.events import Event, Link, Trace, Tree

Slot = tuple[int, str]
"""A name in a folder: the folder's number, and the name."""

ALL = -1
"""How much of a step is on disk: all of it. Another number is how many bytes of a write are."""
ZEROS = -2
"""How much of a step is on disk: of a write the size of the file, and zeros in the place of the bytes."""


@dataclass(frozen=True)
class Data:
    """A write to a file, or its truncation (`size` is not None)."""

    file: int
    offset: int = 0
    data: bytes = b""
    size: int | None = None


@dataclass(frozen=True)
class Name:
    """A change of names: what each slot holds afterwards, None for nothing. A rename changes two slots at once."""

    slots: tuple[tuple[Slot, int | None], ...]


@dataclass(frozen=True)
class Sync:
    """What a sync puts on disk: the bytes of files, the names in folders, or everything."""

    file: int | None = None
    folder: int | None = None


Step = Data | Name | Sync


@dataclass
class Disk:
    """Files and folders by number. A file is bytes, or a symbolic link."""

    files: dict[int, bytearray | Link] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})

    def copy(self) -> Disk:
        """A copy of the disk state that can be changed independently. File contents are shared until a change."""
        return Disk(dict(self.files), {number: dict(names) for number, names in self.folders.items()})

    def tree(self) -> dict[str, bytes | None]:
        """What can be reached from the checkpoint's folder by name."""
        found: dict[str, bytes | None] = {}
        waiting = [("", 0)]
        while waiting:
            path, number = waiting.pop()
            for name, child in self.folders[number].items():
                below = f"{path}/{name}" if path else name
                if child in self.folders:
                    found[below] = None
                    waiting.append((below, child))
                else:
                    content = self.files[child]
                    found[below] = content if isinstance(content, Link) else bytes(content)
        return found


class Steps:
    """The steps of a trace, the disk before them, and what of it each number may be."""

    def __init__(self, trace: Trace) -> None:
        self.base = Disk()
        self._live: dict[str, int] = {"": 0}
        self._folders: set[int] = {0}
        self._next = 1
        self._links: dict[int, Link] = {}
        self._load(trace.base)
        self.steps: tuple[Step, ...] = tuple(step for event in trace.events for step in self._of(event))

    def _load(self, tree: Tree) -> None:
        for path in sorted(tree):
            data = tree[path]
            number = self._new(path, folder=data is None)
            slot = self._slot(path)
            self.base.folders[slot[0]][slot[1]] = number
            if data is None:
                self.base.folders[number] = {}
            else:
                self.base.files[number] = data if isinstance(data, Link) else bytearray(data)

    def _new(self, path: str, folder: bool) -> int:
        number = self._next
        self._next += 1
        self._live[path] = number
        if folder:
            self._folders.add(number)
        return number

    def _slot(self, path: str) -> Slot:
        parent, _, name = path.rpartition("/")
        return self._live[parent], name

    def _of(self, event: Event) -> Iterable[Step]:
        path = event.path
        match event.kind:
            case "create" | "mkdir":
                yield Name(((self._slot(path), self._new(path, folder=event.kind == "mkdir")),))
            case "symlink":  # a link is there with what it leads to, or not at all
                number = self._new(path, folder=False)
                self._links[number] = Link(event.data)
                yield Name(((self._slot(path), number),))
            case "unlink" | "rmdir":
                yield Name(((self._slot(path), None),))
                del self._live[path]
            case "link":
                self._live[event.target] = self._live[path]
                yield Name(((self._slot(event.target), self._live[path]),))
            case "rename":
                yield Name(((self._slot(path), None), (self._slot(event.target), self._live[path])))
                self._move(path, event.target)
            case "write":
                yield Data(self._live[path], event.offset, event.data)
            case "truncate":
                yield Data(self._live[path], size=event.offset)
            case "sync_file":
                yield Sync(file=self._live[path])
            case "sync_dir":
                yield Sync(folder=self._live[path])
            case "sync_all":
                yield Sync()

    def _move(self, path: str, target: str) -> None:
        for old in [known for known in self._live if known == target or known.startswith(f"{target}/")]:
            del self._live[old]
        for old in [known for known in self._live if known == path or known.startswith(f"{path}/")]:
            self._live[target + old.removeprefix(path)] = self._live.pop(old)

    def result(self, kept: Mapping[int, int]) -> dict[str, bytes | None]:
        """What is on disk when just these steps reached it.

        Args:
            kept: index of a step → how much of it: `ALL`, `ZEROS`, or bytes of a write.
        """
        disk = self.base.copy()
        disk.folders.update({number: {} for number in self._folders if number not in disk.folders})
        for index in sorted(kept):
            apply(self.steps[index], kept[index], disk)
        disk.files.update(self._links)
        for number in range(1, self._next):
            if number not in disk.folders:
                disk.files.setdefault(number, bytearray())
        return disk.tree()


def apply(step: Step, amount: int, disk: Disk) -> None:
    """Let a step, or as much of it as is said, happen on a disk."""
    match step:
        case Name(slots):
            for (folder, name), number in slots:
                if number is None:
                    disk.folders[folder].pop(name, None)
                else:
                    disk.folders[folder][name] = number
        case Data(file, offset, data, size):
            content = bytearray(disk.files.get(file, b""))
            disk.files[file] = content
            if size is not None:
                content[size:] = b"\0" * max(0, size - len(content))
                return
            data = bytes(len(data)) if amount == ZEROS else data if amount == ALL else data[:amount]
            content.extend(b"\0" * max(0, offset + len(data) - len(content)))
            content[offset : offset + len(data)] = data


def needs(steps: Sequence[Step]) -> list[frozenset[int]]:
    """For each step the earlier ones without which it cannot be on disk.

    A change of a name needs the earlier changes of the same name, and a change of bytes needs the earlier truncations
    of the same file, since a file system allocates what is written after a truncation after it. Writes to one file do
    not need each other.
    """
    found: list[frozenset[int]] = []
    of_slot: dict[Slot, list[int]] = {}
    of_file: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        before: set[int] = set()
        match step:
            case Name(slots):
                for slot, _ in slots:
                    before.update(of_slot.get(slot, ()))
                    of_slot.setdefault(slot, []).append(index)
            case Data(file, size=size):
                before.update(of_file.get(file, ()))
                if size is not None:
                    of_file.setdefault(file, []).append(index)
        found.append(frozenset(before).union(*(found[earlier] for earlier in before)))
    return found


def durable(steps: Sequence[Step], crash: int, required: Sequence[frozenset[int]]) -> set[int]:
    """The steps before a crash that some sync had put on disk, with all that these need.

    Syncing a file puts its bytes on disk and not its name, as fsync(2) says; a rename between two folders is on disk
    when either of them is synced, since it is one change.
    """
    sure: set[int] = set()
    for later in range(crash):
        match steps[later]:
            case Sync(file=None, folder=None):
                sure.update(range(later))
            case Sync(file=file) if file is not None:
                sure.update(i for i in range(later) if isinstance(s := steps[i], Data) and s.file == file)
            case Sync(folder=folder):
                sure.update(i for i in range(later) if isinstance(s := steps[i], Name) and _touches(s, folder))
    return sure.union(*(required[index] for index in sure))


def _touches(step: Name, folder: int | None) -> bool:
    return any(slot[0] == folder for slot, _ in step.slots)
