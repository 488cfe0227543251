"""The default folder of a run's results, the lock on a folder in use, and the search for the latest folder.

*A command has a folder of its own.* `shardproof run nightly` writes into `reports/nightly`; with options that change
what runs, such as `--set` or `--fault`, into `reports/nightly-3f9a1c`, after a digest of them. So another command
writes over nothing, and the same command finds what it left: it goes on with a run that was cut off, or compares with
the one before. `reports/latest` is a link to the folder of the run begun last.

*One run at a time works in a folder.* It holds a lock that the kernel releases with the process, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from shardproof.errors import UsageError

REPORTS = Path("reports")
LATEST = "latest"
LOCK = ".lock"
MOST_CHARACTERS = 80
CACHE_VARIABLE = "SHARDPROOF_CACHE"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def folder_of(names: Sequence[str], systems: Sequence[str], shard: str | None, others: Mapping[str, object]) -> Path:
    """The folder of a run for which none was named.

    Args:
        names, systems, shard: as on the command line; they can be read in the folder's name.
        others: further options that change what runs; those that are empty do not count.
    """
    wanted = [*(Path(name).stem for name in names), *systems] if names else ["smoke", *systems]
    title = "-".join(wanted)
    clean = re.sub(r"[^A-Za-z0-9_.@+-]", "_", title).lstrip(".")[:MOST_CHARACTERS]
    said = {key: value for key, value in others.items() if value}
    if clean != title or clean == LATEST:
        said["title"] = title
    if far := [os.path.abspath(name) for name in names if _is_elsewhere(name)]:
        said["files"] = far
    digest = sha256(repr(sorted(said.items())).encode("utf-8", "backslashreplace")).hexdigest()[:6]
    part = [shard.replace("/", "of")] if shard else []
    return REPORTS / "-".join([clean, *([digest] if said else []), *part])


def _is_elsewhere(name: str) -> bool:
    """Whether a name is that of a file which is not in the current folder: two such may have one name."""
    return name.endswith(".toml") and os.path.dirname(name) not in ("", ".")


def cache_root() -> Path:
    """Where installed releases and walks are kept: SHARDPROOF_CACHE, or ~/.cache/shardproof."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "shardproof")


def point_latest(folder: Path) -> None:
    """Have `reports/latest` lead to a folder beside it. What stands there and is no link is left alone."""
    link = folder.parent / LATEST
    if link.exists() and not link.is_symlink():
        return
    with suppress(OSError), tempfile.TemporaryDirectory(prefix=".latest-", dir=folder.parent) as scratch:
        fresh = Path(scratch, LATEST)
        fresh.symlink_to(folder.name)
        os.replace(fresh, link)


@contextmanager
def at_work_in(folder: Path) -> Iterator[None]:
    """Be the only run in a folder.

    Raises:
        UsageError: another process is at work there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(folder / LOCK, flags, 0o666)
    except OSError as error:
        allowed = f"a folder whose {LOCK} can be opened ({error.strerror})"
        raise UsageError.of("--out", str(folder), allowed, "--out reports/another") from None
    try:
        _lock(handle, folder)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = re.sub(rb"[^0-9]", b"", os.pread(handle, 20, 0)).decode() or "unknown"
        allowed = f"a folder in which no run is going on (process {pid} is at work in this one)"
        raise UsageError.of("--out", str(folder), allowed, "--out reports/another") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
