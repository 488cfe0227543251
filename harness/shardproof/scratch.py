"""Temporary folders that are removed even if the process that used them was killed.

What running scenarios write lies in memory where there is room (`laboratory.scratch_folder`), and there a folder that
nobody removes takes memory until the machine is started again. A process that is killed cannot remove its own; its warm
server does. But who kills a whole job, as a batch system and the kernel's own out-of-memory killer do, kills the server
with it.

So a folder is *held*: its user has it open and locked, which the kernel undoes with the process. The next one that
needs a folder in the same place removes those that nobody holds.

*Does not verify*: that a lock is seen by every machine which shares a file system. Only folders of a RAM disk are
removed, which no other machine can see.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PREFIX = "shardproof-held-"


class HeldFolder:
    """A new folder, which this process holds until `remove`.

    Args:
        parent: where. sweeps: remove what nobody holds there first.
    """

    def __init__(self, parent: Path, *, sweeps: bool) -> None:
        if sweeps:
            sweep(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            with suppress(FileNotFoundError):  # swept by another process before it was locked
                self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(self._handle, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._handle)

    def remove(self) -> None:
        """Remove the folder, and hold it no longer."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def sweep(parent: Path) -> list[Path]:
    """Remove scratch folders whose process has ended, and return their paths. Folders of another user are left
    alone."""
    swept = []
    for path in unheld(parent, PREFIX):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def unheld(parent: Path, prefix: str) -> Iterator[Path]:
    """Folders and files of a prefix that nobody has locked. Each is locked here until the next is asked for."""
    for path in sorted(parent.glob(f"{glob.escape(prefix)}*")):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            finally:
                os.close(handle)
