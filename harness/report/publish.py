"""Writing a report file: whole or not at all, with errors that a user can act on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from harness.errors import UsageError
from harness.store import StoreFull


def publish(path: Path, text: str) -> Path:
    """Write `text` to `path` through a temporary file beside it, so that a reader never sees half a report.

    Raises:
        UsageError: the place cannot be written.
        StoreFull: the disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            partial.unlink(missing_ok=True)
            raise StoreFull(f"cannot write {path}: {error.strerror}; the results themselves are kept") from error
        raise UsageError.of(
            "output file", str(path), f"a writable place ({error.strerror})", "reports/run.json"
        ) from None
    return path
