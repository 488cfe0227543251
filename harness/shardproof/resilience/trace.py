"""Records what a process does to a folder, by strace: every system call that changes it or syncs it, with its bytes.

strace sees the calls of Python and of native writers alike, of all threads and child processes, needs no root for
processes of one's own, and is a Debian package. The process is attached to right before the save begins, so that the
record holds the save and nothing else.

`recorded_of` reads strace's lines. What it cannot know is checked rather than trusted: `require_complete` lets the
events happen on the folder's old content and compares with the folder as it is. A writer that maps a file into memory,
or uses a call that is not listed here, is refused in this way, and never reported on from half a record.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardproof.errors import HarnessError, UsageError
from shardproof.resilience.events import Call, Event, Link, Trace, tree_of
from shardproof.resilience.stages import MARK, stages_of
from shardproof.resilience.steps import ALL, Steps, Sync
from shardproof.resilience.strace_lines import (
    TEXT,
    join_interrupted,
    number_of,
    path_of_descriptor,
    paths_of,
    unescaped,
)

CALLS = (
    "open", "openat", "creat", "close", "dup", "dup2", "dup3", "fcntl", "lseek", "clone", "clone3", "fork", "vfork",
    "write", "writev", "pwrite64", "pwritev", "pwritev2", "truncate", "ftruncate", "fallocate", "copy_file_range",
    "sendfile", "fsync", "fdatasync", "syncfs", "sync", "rename", "renameat", "renameat2", "link", "linkat", "symlink",
    "symlinkat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir",
)  # fmt: skip
_BY_DESCRIPTOR = (
    "close", "dup", "dup2", "dup3", "fcntl", "lseek", "write", "writev", "pwrite64", "pwritev", "pwritev2", "ftruncate",
    "fallocate", "fsync", "fdatasync", "syncfs", "read", "readv", "pread64", "preadv", "preadv2", "getdents64", "fstat",
)  # fmt: skip
"""Calls whose texts are no paths."""
END_S = 120.0
"""Seconds that strace may take to end after what it traced, and to write its record, also on a machine that is busy."""
MOST_LINKS = 40
"""So many symbolic links are followed on the way to a file, as Linux does."""
LONGEST_WRITE = 1 << 27
"""Bytes of one write that are recorded."""

_FORKS = ("clone", "clone3", "fork", "vfork")

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+|\?)(.*)$", re.DOTALL)
_SENT = re.compile(r", \d+<((?:\\x[0-9a-f]{2})*)>, \[(\d+)\]")
"""Of sendfile: the file that it reads, and from where on."""


Changed = tuple[str, Event, Call]
"""A change of the folder: the thread that made it, the event, and the call to be found again."""


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


def recording(record: Path, calls: Sequence[str] = CALLS) -> list[str]:
    """The words before which nothing and behind which a program or `-p` stands, for strace to write a file of it.

    Raises:
        UsageError: strace is not installed.
    """
    return [
        require_strace(), "-f", "-y", "-xx", "-s", str(LONGEST_WRITE), "-e", f"trace={','.join(calls)}",
        "-e", "signal=none", "-o", str(record),
    ]  # fmt: skip


@contextmanager
def attached(process: int, record: Path, *more: str, calls: Sequence[str] = CALLS) -> Iterator[None]:
    """Trace a process of ours, and all that it starts, into a file, while this block lasts or until it ends.

    Args:
        more: further options of strace. calls: which system calls.

    Raises:
        TraceError: strace cannot attach.
    """
    tracer = subprocess.Popen(
        [*recording(record, calls), *more, "-p", str(process)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert tracer.stderr is not None
    try:
        said = tracer.stderr.readline().decode("utf-8", "replace")
        if " attached" not in said:
            raise TraceError(f"strace cannot attach to a process of ours: {said.strip() or 'it says nothing'}")
        yield
        tracer.wait(END_S)
    except subprocess.TimeoutExpired:
        raise TraceError("strace did not end with the process that it traced") from None
    finally:
        tracer.kill()
        tracer.wait()
        tracer.stderr.close()


def read_trace(record: Path, folder: Path, base: dict[str, bytes | None], ranks: int) -> Trace:
    """The trace of a save into a folder, whose content before it was `base`.

    The changes of several ranks, threads and processes are put in an order that does not depend on chance
    (`_in_order`). It could have happened as well as the recorded one, and it is checked to lead to the same folder.

    Raises:
        TraceError: the record does not explain what the folder holds now.
    """
    lines = lines_of(record)
    whole = join_interrupted(lines)
    marks = _marks(whole, _Reader(str(folder.resolve()), {}, {}).inside, {})
    numbered = any(name.isdigit() for names in marks.values() for name in names)
    recorded = _in_order(list(recorded_of(lines, folder, base, ranks)), _started(whole), ranks, numbered=numbered)
    trace = Trace(base, tuple(event for _, event, _ in recorded), tuple(call for *_, call in recorded))
    require_complete(trace, tree_of(folder))
    return trace


def _in_order(recorded: list[Changed], started: Mapping[str, int], ranks: int, *, numbered: bool) -> list[Changed]:
    """Changes by stage of the save, then by rank, since ranks of one stage do not wait for each other. Of one rank:

    * in a stage that a writer has numbered, one thread after the other, as the names go that they change first: they do
      not wait for each other;
    * between two collectives, and in a save that says nothing of stages, as recorded; but what its helpers do between
      two changes of the process or thread that started them, one helper after the other as they were started.
    """
    roots = range(1, ranks + 1) if ranks > 1 else (0,)
    first: dict[tuple[int, str], str] = {}
    by_root: Counter[int] = Counter()
    keys: list[tuple[int, int, str, int, int]] = []
    for thread, event, call in recorded:
        staged = numbered and call.stage > 0
        path = first.setdefault((call.stage, thread), event.path) if staged else ""
        number = started.get(thread, 0)
        by_root[call.rank] += number in roots and not staged
        helper = 0 if staged or number in roots else number
        keys.append((call.stage, call.rank, path, by_root[call.rank], helper))
    return [recorded[index] for index in sorted(range(len(recorded)), key=lambda index: keys[index])]


def lines_of(record: Path) -> list[str]:
    """The lines of a file that strace wrote."""
    return record.read_text("utf-8", "surrogateescape").splitlines()


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
    contents: dict[str, bytearray]
    """What the files hold; names of one file share it."""
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic link → the path that it leads to; None of them is followed out of the folder."""
    tables: dict[str, dict[int, _Open]] = field(default_factory=dict)

    def inside(self, path: str) -> str | None:
        """A path relative to the folder, or None for one outside."""
        path = os.path.normpath(path)
        if path == self.folder:
            return ""
        return path.removeprefix(f"{self.folder}/") if path.startswith(f"{self.folder}/") else None

    def followed(self, path: str, *, last: bool = False) -> str | None:
        """A path relative to the folder behind the symbolic links on its way, or None for one outside. last: where the
        path itself is a link, what that leads to."""
        found = self.inside(path)
        for _ in range(MOST_LINKS):
            parts = found.split("/") if found else []
            ways = ["/".join(parts[:n]) for n in range(1, len(parts) + last)]
            link = next((way for way in ways if way in self.links), None)
            if found is None or link is None:
                return found
            target = os.path.join(self.folder, os.path.dirname(link), self.links[link])
            found = self.inside(f"{target}{found.removeprefix(link)}")
        return None

    def read(self, process: str, call: str, given: str, result: int) -> Iterator[Event]:
        """The events of one call."""
        table = self.tables.setdefault(process, {})
        match call:
            case "clone" | "clone3" | "fork" | "vfork":
                self.tables[str(result)] = table if "CLONE_FILES" in given else dict(table)
            case "open" | "openat" | "creat":
                yield from self._open(table, call, given, result)
            case "dup" | "dup2" | "dup3" | "fcntl":
                if (call != "fcntl" or "F_DUPFD" in given) and number_of(given) in table:
                    table[result] = table[number_of(given)]
            case "close":
                table.pop(number_of(given), None)
            case "lseek":
                if number_of(given) in table:
                    table[number_of(given)].at = result
            case "write" | "writev" | "pwrite64" | "pwritev" | "pwritev2":
                yield from self._write(table, call, given, result)
            case "ftruncate" | "truncate":
                yield from self._truncate(call, given)
            case "sendfile":
                yield from self._sendfile(table, call, given, result)
            case "copy_file_range" | "fallocate":
                self._refuse(call, given)
            case "fsync" | "fdatasync" | "syncfs" | "sync":
                yield from self._sync(call, given)
            case _:
                yield from self._name(call, given)

    def _open(self, table: dict[int, _Open], call: str, given: str, number: int) -> Iterator[Event]:
        path = self.followed(paths_of(given)[0], last="O_NOFOLLOW" not in given)
        if path is None or (call != "creat" and "O_WRONLY" not in given and "O_RDWR" not in given):
            return
        made, cut = "O_CREAT" in given or call == "creat", "O_TRUNC" in given or call == "creat"
        if path not in self.names and made:
            self.names[path] = False
            self.contents[path] = bytearray()
            yield Event("create", path)
        elif cut and self.contents.get(path):
            self.contents[path].clear()
            yield Event("truncate", path, offset=0)
        table[number] = _Open(path, appends="O_APPEND" in given)

    def _write(self, table: dict[int, _Open], call: str, given: str, count: int) -> Iterator[Event]:
        number = number_of(given)
        path = self.inside(path_of_descriptor(given))
        if path is None or number not in table or path not in self.names:
            return
        data = b"".join(unescaped(text) for text in TEXT.findall(given))[:count]
        opened = table[number]
        if call.startswith("p"):
            at = int(given.rpartition(",")[2]) if call != "pwritev2" else int(given.split(",")[-2])
        else:
            at = len(self.contents[path]) if opened.appends else opened.at
            opened.at = at + count
        yield self._written(path, at, data)

    def _sendfile(self, table: dict[int, _Open], call: str, given: str, count: int) -> Iterator[Event]:
        """A file that is copied into the folder, as shutil does it, from elsewhere or from the folder itself."""
        number, path = number_of(given), self.inside(path_of_descriptor(given))
        if path is None or number not in table or path not in self.names:
            return
        source = _SENT.search(given)
        if source is None:
            self._refuse(call, given)
            return
        name, offset = os.fsdecode(unescaped(source[1])), int(source[2])
        own = self.inside(name)
        held = Path(name).read_bytes() if own is None else self.contents[own]  # no save changes what is elsewhere
        opened = table[number]
        at, opened.at = opened.at, opened.at + count
        if count:
            yield self._written(path, at, bytes(held[offset : offset + count]))

    def _written(self, path: str, at: int, data: bytes) -> Event:
        held = self.contents[path]
        held.extend(bytes(max(0, at - len(held))))
        held[at : at + len(data)] = data
        return Event("write", path, offset=at, data=data)

    def _truncate(self, call: str, given: str) -> Iterator[Event]:
        path = self.inside(path_of_descriptor(given) if call == "ftruncate" else paths_of(given)[0])
        if path is not None and path in self.names:
            size, held = int(given.rpartition(",")[2]), self.contents[path]
            del held[size:]
            held.extend(bytes(size - len(held)))
            yield Event("truncate", path, offset=size)

    def _refuse(self, call: str, given: str) -> None:
        if self.inside(path_of_descriptor(given)) is not None:
            raise TraceError(f"a save that calls {call} on a file of the checkpoint cannot be recorded")

    def _sync(self, call: str, given: str) -> Iterator[Event]:
        if call in ("sync", "syncfs"):
            yield Event("sync_all", "")
            return
        path = self.inside(path_of_descriptor(given))
        if path is not None and (path == "" or path in self.names):
            yield Event("sync_dir" if path == "" or self.names[path] else "sync_file", path)

    def _name(self, call: str, given: str) -> Iterator[Event]:
        if call.startswith("symlink"):
            yield from self._symlink(given)
            return
        paths = [self.followed(path) for path in paths_of(given)]
        path, target = paths[0], paths[1] if len(paths) > 1 else None
        match call.removesuffix("2").removesuffix("at"):
            case "mkdir" if path:
                self.names[path] = True
                yield Event("mkdir", path)
            case "rmdir" | "unlink" if path:
                self.names.pop(path, None)
                self.links.pop(path, None)
                yield Event("rmdir" if call == "rmdir" or "AT_REMOVEDIR" in given else "unlink", path)
            case "link" if path and target:
                self.names[target], self.contents[target] = False, self.contents[path]
                yield Event("link", path, target)
            case "rename" if path == target:
                pass
            case "rename" if path and target:
                self._moved(path, target)
                yield Event("rename", path, target)
            case "link" | "rename" if path or target:
                raise TraceError("a save that moves files into its folder from elsewhere cannot be recorded")

    def _symlink(self, given: str) -> Iterator[Event]:
        leads_to = next(unescaped(found[1]) for found in TEXT.finditer(given))
        path = self.followed(paths_of(given)[-1])
        if path:
            self.names[path], self.links[path] = False, os.fsdecode(leads_to)
            yield Event("symlink", path, data=leads_to)

    def _moved(self, path: str, target: str) -> None:
        self.links.pop(target, None)
        for old in [name for name in self.names if name == path or name.startswith(f"{path}/")]:
            new = target + old.removeprefix(path)
            self.names[new] = self.names.pop(old)
            if old in self.contents:
                self.contents[new] = self.contents.pop(old)
            if old in self.links:
                self.links[new] = self.links.pop(old)


def recorded_of(lines: Iterable[str], folder: Path, base: dict[str, bytes | None], ranks: int = 1) -> Iterator[Changed]:
    """The changes that lines of `strace -f -y -xx` tell of, inside of a folder.

    Args:
        base: what the folder held before. ranks: how many the first process forks; of one, what it forks are helpers.

    Raises:
        TraceError: a call is among them whose effect is not known.
    """
    links = {path: os.fsdecode(data) for path, data in base.items() if isinstance(data, Link)}
    contents = {path: bytearray(data) for path, data in base.items() if data is not None and path not in links}
    reader = _Reader(str(folder.resolve()), {path: data is None for path, data in base.items()}, contents, links)
    for process, name, given, result, call in _calls(lines, reader.inside, ranks):
        if result is not None and result >= 0:
            for event in reader.read(process, name, given, result):
                yield process, event, call or Call(name, event.path, 1)


def calls_of(lines: Iterable[str], folder: Path, ranks: int = 1) -> list[Call]:
    """Every call on the folder or on something in it, also those that failed: one rank after the other, each in order.

    In which order ranks come to their calls is chance, and the number of a call must not depend on it.
    """
    reader = _Reader(str(folder.resolve()), {}, {})
    found = [call for *_, call in _calls(lines, reader.inside, ranks) if call is not None]
    return sorted(found, key=lambda call: call.rank)


Recorded = tuple[str, str, str, int | None, Call | None]
"""The thread, the name of the call, what it was given, what it gave (None: it did not end), and the call to be found
again, if it names something in the folder."""


def _calls(lines: Iterable[str], inside: Callable[[str], str | None], ranks: int) -> Iterator[Recorded]:
    counts: dict[tuple[str, str, str], int] = {}
    whole = join_interrupted(lines)
    rank_of = _ranks_of(whole) if ranks > 1 else {}
    begins = {rank: iter(found) for rank, found in stages_of(_marks(whole, inside, rank_of)).items()}
    stages: dict[int, int] = {}
    for line in whole:
        if (found := _LINE.match(line)) is None:
            continue
        process, name, given = found[1], found[2], found[3]
        result = None if found[4] == "?" else int(found[4])
        places = list(dict.fromkeys(path for place in _places(name, given) if (path := inside(place)) is not None))
        for path in places:
            counts[process, name, path] = counts.get((process, name, path), 0) + 1
        rank = rank_of.get(process, 0)
        if places and places[0].rpartition("/")[2].startswith(MARK):
            stages[rank] = next(begins[rank])
            continue
        nth = counts[process, name, places[0]] if places else 0
        call = Call(name, places[0], nth, rank, stages.get(rank, 0)) if places else None
        yield process, name, given, result, call


def _marks(
    lines: Iterable[str], inside: Callable[[str], str | None], rank_of: Mapping[str, int]
) -> dict[int, list[str]]:
    """Of each rank what stands behind `MARK` in the names that it asked for, in order."""
    marks: dict[int, list[str]] = {}
    for line in lines:
        if (found := _LINE.match(line)) is not None and found[2] == "rmdir":
            name = (inside(paths_of(found[3])[0]) or "").rpartition("/")[2]
            if name.startswith(MARK):
                marks.setdefault(rank_of.get(found[1], 0), []).append(name.removeprefix(MARK))
    return marks


def _places(name: str, given: str) -> list[str]:
    """The paths by which strace's own filter finds a call: those of its descriptors, and those written out whole."""
    found = []
    if path_of_descriptor(given):
        found.append(path_of_descriptor(given))
    if name in _BY_DESCRIPTOR:
        return found
    for match in TEXT.finditer(given):
        text = os.fsdecode(unescaped(match[1]))
        if text.startswith("/"):
            found.append(text)
    return found


def _started(lines: Iterable[str]) -> dict[str, int]:
    """Each thread and process, numbered in the order in which they were started; the first one is 0."""
    found: dict[str, int] = {}
    for line in lines:
        if match := _LINE.match(line):
            found.setdefault(match[1], len(found))
            if match[2] in _FORKS and match[4].isdigit():
                found.setdefault(match[4], len(found))
    return found


def _ranks_of(lines: Iterable[str]) -> dict[str, int]:
    """Which thread or process is part of which rank: the first process forks the ranks, in order, and what a rank
    starts is part of it."""
    found: dict[str, int] = {}
    first, forked = "", 0
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        process, name, given, result = match[1], match[2], match[3], match[4]
        first = first or process
        if name in _FORKS and result.isdigit():
            if process == first and "CLONE_THREAD" not in given:
                found[result] = forked
                forked += 1
            else:
                found[result] = found.get(process, 0)
    return found
