"""Reads the observation files that ranks append to, in the parent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardproof.observe.record import Record, unpack

LENGTH_BYTES = 8


def read_observations(path: Path) -> Iterator[Record]:
    """All records of one rank's file; none when it never wrote one.

    Raises:
        ValueError: the file ends in the middle of an observation, as it does when its rank was killed while writing.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    position = 0
    while position < len(data):
        length = int.from_bytes(data[position : position + LENGTH_BYTES], "little")
        start = position + LENGTH_BYTES
        if start + length > len(data):
            raise ValueError(
                f"{path.name}: truncated: an observation of {length} bytes, {len(data) - start} of them there"
            )
        yield from unpack(data[start : start + length])
        position = start + length
