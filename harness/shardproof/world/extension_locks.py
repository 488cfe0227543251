"""Locks of torch's builds of extensions, which nobody releases when a build is killed.

A library that builds an extension while it is imported, as Megatron-Core 0.15 and DeepSpeed's CPUAdam do, makes the
file `lock` in the extension's folder, and whoever wants the same extension waits without end until it is gone
(`torch.utils.file_baton`). A process that is killed leaves the file. So the locks are removed of a build that was
killed here, and those that are older than any build takes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STALE_S = 1800.0
"""No build of an extension takes so long."""

SLACK_S = 2.0
"""How much the clock of a file system may be behind."""


def clear_stale() -> None:
    """Remove the locks that are older than any build, and say so."""
    for lock, age_s in _locks():
        if age_s > STALE_S:
            with suppress(OSError):
                lock.unlink()
                text = f"removed {lock}, which a killed build left {age_s / 3600:.1f} h ago"
                print(text, file=sys.stderr, flush=True)


def clear_since(started: float) -> None:
    """Remove the locks that were made since a moment, of processes that have been killed. started: see `time.time`."""
    for lock, age_s in _locks():
        if time.time() - age_s >= started - SLACK_S:
            with suppress(OSError):
                lock.unlink()


def _locks() -> Iterator[tuple[Path, float]]:
    """Every lock with its age in seconds; none where torch has never built anything."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions"))
    for pattern in ("*/lock", "*/*/lock"):
        for lock in root.glob(pattern):
            with suppress(OSError):
                yield lock, time.time() - lock.stat().st_mtime
