"""Whether the files of a checkpoint hold what is live: the bytes of each value are looked for in all of them.

That needs no knowledge of the format. `torch.save`, distributed checkpoints, safetensors and plain arrays all store a
contiguous tensor as its bytes, and a flat buffer holds those of its parts. A format that compresses or converts has
next to nothing of what is live; then nothing is claimed, and the result says so.

*Verifies*: tensors of 16 bytes and more that are not all of one byte. *Does not verify*: smaller values, such as
counts of steps; under which name a value is stored.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shardproof.observe.logical import Value

LEAST_BYTES = 16
LEAST_SHARE = 0.25
"""If fewer than this share of the parameters are in the files, they are stored in another form."""


@dataclass(frozen=True)
class Written:
    """missing: (role, name) of what is in no file. empty: there is no file at all. looked_for: how many values. notes:
    what was not compared, and why."""

    missing: tuple[tuple[str, str], ...]
    looked_for: int
    notes: tuple[str, ...] = ()
    empty: bool = False


def written(folder: Path, live: Mapping[tuple[str, str], Value], transient: Sequence[str]) -> Written:
    """What of the live values is in no file below `folder`. transient: patterns of `ROLE NAME` that need not be."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    wanted = {
        key: value
        for key, value in live.items()
        if value.dtype != "utf8" and len(value.data) >= LEAST_BYTES and len(set(value.data)) > 1 and key[0] != "rng"
        and not any(fnmatchcase(" ".join(key), pattern) for pattern in transient)
    }  # fmt: skip
    if not files:
        return Written(tuple(key for key in wanted if key[0] == "param"), len(wanted), empty=True)
    missing = [key for key, value in wanted.items() if not _held(value, files)]
    params = [key for key in wanted if key[0] == "param"]
    absent = [key for key in missing if key[0] == "param"]
    if params and len(absent) > (1 - LEAST_SHARE) * len(params):
        return Written((), len(wanted), ("the files hold the parameters in another form than memory does, so that what "
                                         "they hold was not compared",))  # fmt: skip
    return Written(tuple(missing), len(wanted))


def _held(value: Value, files: Sequence[Path]) -> bool:
    """Whether the bytes of a value are in some file, in one piece or cut into rows."""
    return any(_in_file(path, value.data) for path in files) or _in_rows(value, files)


def _in_rows(value: Value, files: Sequence[Path]) -> bool:
    rows = value.shape[0] if value.shape else 1
    if rows < 2 or len(value.data) % rows:
        return False
    length = len(value.data) // rows
    parts = [value.data[at : at + length] for at in range(0, len(value.data), length)]
    return length >= LEAST_BYTES // 2 and all(any(_in_file(path, part) for path in files) for part in parts)


def _in_file(path: Path, data: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(data) >= 0
