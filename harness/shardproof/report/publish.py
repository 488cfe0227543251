"""Writes an output file atomically, and never over a file that another program wrote.

A path on a command line may name anything: a device such as `/dev/null`, a pipe, somebody's scenario file. What is no
regular file is written into, as the shell's `>` does. A regular file is replaced if it is empty, or if its beginning
says that shardproof wrote it; any other is refused, since its content would be lost. A symbolic link that the user
names stays as it is, and what it leads to is written by the same rules.

The new text goes into a temporary file with a name that nobody can foresee, in the same folder, created exclusively;
then it takes the old one's place. So a reader never sees half a report, and a link that somebody put there beforehand
is not followed. A process that is killed leaves its temporary file; the next one that writes in the folder removes it,
if it is of the same machine and nobody holds its lock.

*Does not verify*: that nobody else writes the same file between the check and the end of the writing.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardproof import __version__
from shardproof.errors import DISK_FAILED, UsageError
from shardproof.scratch import unheld
from shardproof.store import StoreFull

_MARKS = re.compile(
    rb'\A\{\s*"written_by": "shardproof|\A\{"run": \{\s*"id": |\A<\?xml [^>]*>\s*<testsuites name="shardproof"'
    rb'|<meta name="generator" content="shardproof">|<title>shardproof: '
    rb"|\A### shardproof run |\A# Written by shardproof"
)
"""How each kind of file that shardproof writes begins."""

_HEAD_BYTES = 4096
_PARTIAL = ".shardproof-partial-"
_ALLOWED = "a new file, an empty one, or one that shardproof wrote"


def publish(path: Path, text: str) -> Path:
    """Write `text` to `path`.

    Raises:
        UsageError: the place cannot be written, or holds something that is not ours.
        StoreFull: the disk is full.
    """
    data = text.encode("utf-8", "backslashreplace")
    try:
        target = path.resolve() if path.is_symlink() else path
        if _is_special(target):
            _write_into(target, data)
            return path
        _require_ours(target, "output file", "reports/run.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, data)
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise StoreFull(f"cannot write {path}: {error.strerror}; the results themselves are kept") from error
        raise UsageError.of(
            "output file", str(path), f"a writable place ({error.strerror})", "reports/run.json"
        ) from None
    return path


def require_publishable(path: Path, option: str, form: str) -> None:
    """Check, before hours of work, that `publish` can write there. Creates the folder of the file.

    Raises:
        UsageError: it cannot, or the file there is not ours.
    """
    try:
        target = path.resolve() if path.is_symlink() else path
        if target.is_dir():
            raise UsageError.of(option, str(path), "a file, not a folder", form)
        if _is_special(target):
            return
        _require_ours(target, option, form)
        require_writable(target.parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        why = f"a file in a folder that can be written ({_error_text(error)})"
        raise UsageError.of(option, str(path), why, form) from None


def require_writable(folder: Path) -> None:
    """Make a folder and check that files can be created in it; nothing stays there.

    Raises:
        OSError: it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = _partial(folder)
    os.unlink(name)
    os.close(handle)


def _error_text(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _is_special(path: Path) -> bool:
    """Whether something is there that is no regular file: a device, a pipe, a socket."""
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    return False


def _require_ours(path: Path, what: str, form: str) -> None:
    """Check that an output file may be replaced: the path is free, empty, or holds an earlier file of shardproof.

    Raises:
        UsageError: the file was written by another program.
    """
    if path.is_file() and (head := _head(path)) and not _MARKS.search(head):
        raise UsageError.of(what, str(path), f"{_ALLOWED} (this one is not, and would be lost)", form)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _write_into(path: Path, data: bytes) -> None:
    """Write into what is no regular file. A pipe that nobody reads is an error, not a wait for ever."""
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(handle, True)
    with open(handle, "wb") as file:
        file.write(data)


def _replace(path: Path, data: bytes) -> None:
    """Put a whole new file in the place of an old one, with its permissions."""
    handle, partial = _partial(path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), _permissions(path))
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def _partial(folder: Path) -> tuple[int, str]:
    """A new temporary file in a folder, open and locked; what killed processes left there is removed."""
    prefix = f"{_PARTIAL}{platform.node()}-"  # a lock may be seen by one machine only
    for path in unheld(folder, prefix):
        with suppress(OSError):
            path.unlink()
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(name):
            return handle, name
        os.close(handle)  # swept by another process before it was locked


def _permissions(path: Path) -> int:
    """The permission bits for an output file: the bits of the file that is replaced, or the default under the user's
    umask."""
    with suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write a document to a file that was found to be writable; nothing without one."""
    if path is not None:
        publish(path, json_text(document))


def json_text(document: Mapping[str, Any]) -> str:
    """A document as JSON text that begins with `written_by`, by which a later command knows a file of ours."""
    return json.dumps({"written_by": f"shardproof {__version__}", **document}, indent=1, allow_nan=False) + "\n"
