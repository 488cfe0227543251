"""What walks came to, kept from one command to the next: to search for covering rows takes half of the time of a plan.

*Nothing that is kept can be stale.* The rows of a walk are found by a digest of all that their search reads: the tables
of what is allowed, which every command makes anew, the demands, the costs, the seed, and the source of the modules that
search and count. For example, a rule that excludes one combination more makes another table, and so another digest.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from shardproof.folders import cache_root
from shardproof.space.coverage import Coverage
from shardproof.space.covering import Rows
from shardproof.space.feasible import Factor

MOST = 500
"""Walks that are kept; those that were written first go first."""

SEARCHING = ("coverage.py", "covering.py", "feasible.py", "kept.py", "walk.py")
"""Modules of this folder on whose source it depends what a walk comes to."""


@dataclass(frozen=True)
class Found:
    """What a walk came to, in numbers.

    * supported, refused: a row for each scenario, a column for each axis; an entry is the index of a value.
    * cells, valid, coverages: as `walk.Walked` has them.
    """

    supported: Rows
    refused: Rows
    cells: tuple[int, int, int]
    valid: int
    coverages: tuple[Coverage, ...]


def digest_of(asked: Sequence[object], tables: Iterable[Factor]) -> str:
    """The name under which a walk is kept.

    Args:
        asked: what the search is asked for, of values that `repr` writes in full.
        tables: what is allowed.
    """
    digest = sha256(_source())
    digest.update(repr(asked).encode())
    for table in tables:
        digest.update(repr((table.axes, table.allowed.shape)).encode())
        digest.update(np.packbits(table.allowed).tobytes())
    return digest.hexdigest()


@cache
def _source() -> bytes:
    """The source of the modules that search, and the release of numpy, which draws the random numbers."""
    folder = Path(__file__).parent
    return b"\0".join([np.__version__.encode(), *((folder / name).read_bytes() for name in SEARCHING)])


def read(digest: str, sizes: Sequence[int]) -> Found | None:
    """What is kept under a digest; None where nothing is, or what cannot be read.

    Args:
        sizes: how many values each axis has.
    """
    try:
        kept = json.loads((_folder() / f"{digest}.json").read_text("utf-8"))
        supported, refused = (_rows(kept[name], sizes) for name in ("supported", "refused"))
        first, second, third = map(int, kept["cells"])
        coverages = tuple(Coverage(**{**each, "axes": tuple(each["axes"])}) for each in kept["coverages"])
        return Found(supported, refused, (first, second, third), int(kept["valid"]), coverages)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rows(lists: list[list[int]], sizes: Sequence[int]) -> Rows:
    rows = np.array(lists, np.int64).reshape(-1, len(sizes))
    if (rows < 0).any() or (rows >= np.array(sizes)).any():
        raise ValueError("an index of no value")
    return rows


def write(digest: str, found: Found) -> None:
    """Keep what a walk came to; where nothing can be written, as in a home that is read-only, it is not kept."""
    told = {
        "supported": found.supported.tolist(), "refused": found.refused.tolist(), "cells": found.cells,
        "valid": found.valid, "coverages": [asdict(each) for each in found.coverages],
    }  # fmt: skip
    with suppress(OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".walk-", dir=folder) as scratch:
            part = Path(scratch, "walk.json")
            part.write_text(json.dumps(told), "utf-8")
            os.replace(part, folder / f"{digest}.json")
        if len(files := [*folder.glob("*.json")]) > MOST:
            for file in sorted(files, key=lambda file: file.stat().st_mtime)[:-MOST]:
                file.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_root() / "walks"
