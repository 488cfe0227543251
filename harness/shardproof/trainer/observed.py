"""The records of a session, of those operations that every rank completed.

A rank does not know where its part of a tensor begins that a library has cut unevenly, as rows 0 to 4 on rank 0 and 5
to 7 on rank 1: neither the placements nor the rank's own part say how long the parts before it are. Its record says
only which place it has in the order of parts (`in_turn`), and here, with the parts of all ranks, each gets its start.
"""

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
    return placed(record for record in kept if len(ranks[record.op]) == session.ops[0].mesh.world)


def in_turn(start: int) -> int:
    """What stands for the start of a part until all parts are known. start: where even parts would have it begin."""
    return -1 - start


def placed(records: Iterable[Record]) -> list[Record]:
    """Records with a start for each part that had only a place in the order. Parts that are not as long together as the
    tensor are recorded as each rank's own."""
    kept = list(records)
    dims = {_key(record): dim for record in kept for dim, start in enumerate(record.start) if start < 0}
    if not dims:
        return kept
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in kept:
        if _key(record) in dims:
            groups.setdefault(_key(record), []).append(record)
    found = {id(record): one for key, parts in groups.items() for record, one in _in_order(parts, dims[key])}
    return [found.get(id(record), record) for record in kept]


def _key(record: Record) -> tuple[object, ...]:
    return record.op, record.where, record.role, record.fqn, record.replica


def _in_order(parts: list[Record], dim: int) -> Iterator[tuple[Record, Record]]:
    """The parts of one tensor, and for each the record with a start that takes its place."""
    ordered = sorted(parts, key=lambda part: (_turn(part.start[dim]), part.rank))
    fits = sum(part.size[dim] for part in parts) == parts[0].shape[dim]
    position = 0
    for part in ordered:
        start = (*part.start[:dim], position, *part.start[dim + 1 :])
        position += part.size[dim]
        own = part._replace(fqn=f"rank{part.rank}.{part.fqn}", shape=part.size, start=(0,) * len(part.size))
        yield part, part._replace(start=start) if fits else own


def _turn(start: int) -> int:
    return start if start >= 0 else -1 - start


def _read(path: Path, *, whole: bool) -> Iterator[Record]:
    """The records of one rank's file."""
    try:
        yield from read_observations(path)
    except ValueError:
        if whole:
            raise
