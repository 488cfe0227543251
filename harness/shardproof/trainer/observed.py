"""The records of a session, of those operations that every rank completed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from shardproof.observe.record import Record
from shardproof.trainer.arms import Session
from shardproof.world.observations import read_observations


def records_of(paths: Iterable[str], session: Session, *, whole: bool) -> list[Record]:
    """The records in the files of a session's ranks.

    Args:
        whole: whether each file must end with a whole observation, since its rank did.
    """
    kept = [record for path in paths for record in _read(Path(path), whole=whole)]
    ranks: dict[int, set[int]] = {}
    for record in kept:
        ranks.setdefault(record.op, set()).add(record.rank)
    return [record for record in kept if len(ranks[record.op]) == session.ops[0].mesh.world]


def _read(path: Path, *, whole: bool) -> Iterator[Record]:
    """The records of one rank's file."""
    try:
        yield from read_observations(path)
    except ValueError:
        if whole:
            raise
