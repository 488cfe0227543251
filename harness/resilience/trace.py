"""Records what a process does to a folder, by strace: every system call that changes it or syncs it, with its bytes.

strace sees the calls of Python and of native writers alike, of all threads and child processes, needs no root for
processes of one's own, and is a Debian package. The process is attached to right before the save begins, so that the
record holds the save and nothing else.

`events_of` reads strace's lines. What it cannot know is checked rather than trusted: `require_complete` lets the events
happen on the folder's old content and compares with the folder as it is. A writer that maps a file into memory, or uses
a call that is not listed here, is refused in this way, and never reported on from half a record.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import HarnessError, UsageError
from harness.resilience.events import Event, Trace, tree_of
from harness.resilience.steps import ALL, Steps, Sync

CALLS = (
    "open", "openat", "creat", "close", "dup", "dup2", "dup3", "fcntl", "lseek", "clone", "clone3", "fork", "vfork",
    "write", "writev", "pwrite64", "pwritev", "pwritev2", "truncate", "ftruncate", "fallocate", "copy_file_range",
    "sendfile", "fsync", "fdatasync", "syncfs", "sync", "rename", "renameat", "renameat2", "link", "linkat", "unlink",
    "unlinkat", "mkdir", "mkdirat", "rmdir",
)  # fmt: skip
LONGEST_WRITE = 1 << 27
"""Bytes of one write that are recorded."""

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+|\?)(.*)$", re.DOTALL)
_UNFINISHED = re.compile(r"^(\d+) +(.*) <unfinished \.\.\.>$", re.DOTALL)
_RESUMED = re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$", re.DOTALL)
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"^(-?\d+|AT_FDCWD)(?:<((?:\\x[0-9a-f]{2})*)>)?")


class TraceError(HarnessError):
    """A save could not be recorded."""


def require_strace() -> str:
    """The path of strace.

    Raises:
        UsageError: it is not installed.
    """
    path = shutil.which("strace")
    if path is None:
        needed = "a machine with strace, since it records what a save writes (Debian, Ubuntu: apt-get install strace)"
        raise UsageError.of("strace", "none on the PATH", needed, "strace -V")
    return path


@contextmanager
def attached(process: int, record: Path, *more: str) -> Iterator[None]:
    """Trace a process of ours, and all that it starts, into a file, while this block lasts or until it ends.

    Args:
        more: further options of strace.

    Raises:
        TraceError: strace cannot attach.
    """
    command = [
        require_strace(), "-f", "-y", "-xx", "-s", str(LONGEST_WRITE), "-e", f"trace={','.join(CALLS)}",
        "-e", "signal=none", *more, "-o", str(record), "-p", str(process),
    ]  # fmt: skip
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert tracer.stderr is not None
    try:
        said = tracer.stderr.readline().decode("utf-8", "replace")
        if " attached" not in said:
            raise TraceError(f"strace cannot attach to a process of ours: {said.strip() or 'it says nothing'}")
        yield
        tracer.wait(30)
    except subprocess.TimeoutExpired:
        raise TraceError("strace did not end with the process that it traced") from None
    finally:
        tracer.kill()
        tracer.wait()
        tracer.stderr.close()


def read_trace(record: Path, folder: Path, base: dict[str, bytes | None]) -> Trace:
    """The trace of a save into a folder, whose content before it was `base`.

    Raises:
        TraceError: the record does not explain what the folder holds now.
    """
    lines = record.read_text("utf-8", "surrogateescape").splitlines()
    trace = Trace(base, tuple(events_of(lines, folder, base)))
    require_complete(trace, tree_of(folder))
    return trace


def require_complete(trace: Trace, after: dict[str, bytes | None]) -> None:
    """Check that the events lead from the old content to the new.

    Raises:
        TraceError: they do not.
    """
    steps = Steps(trace)
    kept = {index: ALL for index, step in enumerate(steps.steps) if not isinstance(step, Sync)}
    found = steps.result(kept)
    if wrong := sorted(path for path in {*found, *after} if found.get(path, "") != after.get(path, "")):
        raise TraceError(
            f"the record of system calls does not explain {wrong[0]!r}: a writer that maps files into memory, or uses "
            f"calls that are not recorded, cannot be tried"
        )


@dataclass
class _Open:
    """An open file: where its next write goes. Descriptors share it after dup and fork."""

    path: str
    at: int = 0
    appends: bool = False


@dataclass
class _Reader:
    folder: str
    names: dict[str, bool]
    """Path → whether it is a folder."""
    sizes: dict[str, int]
    tables: dict[str, dict[int, _Open]] = field(default_factory=dict)

    def inside(self, path: str) -> str | None:
        """A path relative to the folder, or None for one outside."""
        path = os.path.normpath(path)
        if path == self.folder:
            return ""
        return path.removeprefix(f"{self.folder}/") if path.startswith(f"{self.folder}/") else None

    def read(self, process: str, call: str, given: str, result: int) -> Iterator[Event]:
        """The events of one call."""
        table = self.tables.setdefault(process, {})
        match call:
            case "clone" | "clone3" | "fork" | "vfork":
                self.tables[str(result)] = table if "CLONE_FILES" in given else dict(table)
            case "open" | "openat" | "creat":
                yield from self._open(table, call, given, result)
            case "dup" | "dup2" | "dup3" | "fcntl":
                if (call != "fcntl" or "F_DUPFD" in given) and _number(given) in table:
                    table[result] = table[_number(given)]
            case "close":
                table.pop(_number(given), None)
            case "lseek":
                if _number(given) in table:
                    table[_number(given)].at = result
            case "write" | "writev" | "pwrite64" | "pwritev" | "pwritev2":
                yield from self._write(table, call, given, result)
            case "ftruncate" | "truncate":
                yield from self._truncate(call, given)
            case "copy_file_range" | "sendfile" | "fallocate":
                self._refuse(call, given)
            case "fsync" | "fdatasync" | "syncfs" | "sync":
                yield from self._sync(call, given)
            case _:
                yield from self._name(call, given)

    def _open(self, table: dict[int, _Open], call: str, given: str, number: int) -> Iterator[Event]:
        path = self.inside(_paths(given)[0])
        if path is None or (call != "creat" and "O_WRONLY" not in given and "O_RDWR" not in given):
            return
        made, cut = "O_CREAT" in given or call == "creat", "O_TRUNC" in given or call == "creat"
        if path not in self.names and made:
            self.names[path] = False
            self.sizes[path] = 0
            yield Event("create", path)
        elif cut and self.sizes.get(path):
            self.sizes[path] = 0
            yield Event("truncate", path, offset=0)
        table[number] = _Open(path, appends="O_APPEND" in given)

    def _write(self, table: dict[int, _Open], call: str, given: str, count: int) -> Iterator[Event]:
        number = _number(given)
        path = self.inside(_descriptor(given))
        if path is None or number not in table or path not in self.names:
            return
        data = b"".join(_unescaped(text) for text in _TEXT.findall(given))[:count]
        opened = table[number]
        if call.startswith("p"):
            at = int(given.rpartition(",")[2]) if call != "pwritev2" else int(given.split(",")[-2])
        else:
            at = self.sizes[path] if opened.appends else opened.at
            opened.at = at + count
        self.sizes[path] = max(self.sizes[path], at + count)
        yield Event("write", path, offset=at, data=data)

    def _truncate(self, call: str, given: str) -> Iterator[Event]:
        path = self.inside(_descriptor(given) if call == "ftruncate" else _paths(given)[0])
        if path is not None and path in self.names:
            self.sizes[path] = size = int(given.rpartition(",")[2])
            yield Event("truncate", path, offset=size)

    def _refuse(self, call: str, given: str) -> None:
        if self.inside(_descriptor(given)) is not None:
            raise TraceError(f"a save that calls {call} on a file of the checkpoint cannot be recorded")

    def _sync(self, call: str, given: str) -> Iterator[Event]:
        if call in ("sync", "syncfs"):
            yield Event("sync_all", "")
            return
        path = self.inside(_descriptor(given))
        if path is not None and (path == "" or path in self.names):
            yield Event("sync_dir" if path == "" or self.names[path] else "sync_file", path)

    def _name(self, call: str, given: str) -> Iterator[Event]:
        paths = [self.inside(path) for path in _paths(given)]
        path, target = paths[0], paths[1] if len(paths) > 1 else None
        match call.removesuffix("2").removesuffix("at"):
            case "mkdir" if path:
                self.names[path] = True
                yield Event("mkdir", path)
            case "rmdir" | "unlink" if path:
                self.names.pop(path, None)
                yield Event("rmdir" if call == "rmdir" or "AT_REMOVEDIR" in given else "unlink", path)
            case "link" if path and target:
                self.names[target], self.sizes[target] = False, self.sizes[path]
                yield Event("link", path, target)
            case "rename" if path and target:
                self._moved(path, target)
                yield Event("rename", path, target)
            case "link" | "rename" if path or target:
                raise TraceError("a save that moves files into its folder from elsewhere cannot be recorded")

    def _moved(self, path: str, target: str) -> None:
        for old in [name for name in self.names if name == path or name.startswith(f"{path}/")]:
            new = target + old.removeprefix(path)
            self.names[new] = self.names.pop(old)
            if old in self.sizes:
                self.sizes[new] = self.sizes.pop(old)


def events_of(lines: Iterable[str], folder: Path, base: dict[str, bytes | None]) -> Iterator[Event]:
    """The events that lines of `strace -f -y -xx` tell of, inside of a folder.

    Args:
        base: what the folder held before.

    Raises:
        TraceError: a call is among them whose effect is not known.
    """
    sizes = {path: len(data) for path, data in base.items() if data is not None}
    reader = _Reader(str(folder.resolve()), {path: data is None for path, data in base.items()}, sizes)
    for line in _whole(lines):
        if (found := _LINE.match(line)) and found[4] != "?" and int(found[4]) >= 0:
            yield from reader.read(found[1], found[2], found[3], int(found[4]))


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """Lines with the two halves of an interrupted call put together, where it ended."""
    begun: dict[str, str] = {}
    for line in lines:
        if found := _UNFINISHED.match(line):
            begun[found[1]] = f"{found[1]} {found[2]}"
        elif found := _RESUMED.match(line):
            yield begun.pop(found[1], found[1]) + found[2]
        else:
            yield line


def _number(given: str) -> int:
    """The descriptor that is a call's first argument."""
    found = _DESCRIPTOR.match(given)
    return int(found[1]) if found and found[1] != "AT_FDCWD" else -1


def _descriptor(given: str) -> str:
    """The path of the descriptor that is a call's first argument."""
    found = _DESCRIPTOR.match(given)
    return os.fsdecode(_unescaped(found[2] or "")) if found else ""


def _paths(given: str) -> list[str]:
    """The absolute paths that a call names, each behind the descriptor of the folder that it is relative to, if any."""
    found = []
    for match in re.finditer(r'(?:(?:-?\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>, )?"((?:\\x[0-9a-f]{2})*)"', given):
        name = os.fsdecode(_unescaped(match[2]))
        found.append(os.path.join(os.fsdecode(_unescaped(match[1] or "")), name))
    return found


def _unescaped(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
