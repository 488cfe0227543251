"""Assemble the pieces that ranks hold into logical tensors.

For example, four ranks of FSDP hold rows 0 to 1, 2 to 3, 4 and nothing of a weight of five rows. Their records become
one value of five rows. If rank 2 said rows 3 to 4, row 3 would be an `overlap`; if it said nothing, row 4 would be a
`gap`; and where two replicas of a shard differ, that is a `replica_conflict`.

*Verifies*: pieces of one value agree on dtype and shape; each has as many bytes as its box; boxes lie inside the
tensor; ranks that hold the same box hold the same bits; different boxes share no element; together they cover every
element.
*Does not verify*: which rank holds which box (any partition of the tensor is accepted), nor any value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from harness.layout import Box, inside, multi_index
from harness.observe.logical import Key, Logical, Problem, Value
from harness.observe.record import ITEMSIZE, PER_RANK_ROLES, Record, every_rank

_identity = attrgetter("op", "where", "role", "fqn")
_CONTENT = slice(Record._fields.index("dtype"), Record._fields.index("others"))
"""The fields of a record that replicas have in common: all from `dtype` on but which ranks they are on."""

Bits = npt.NDArray[np.unsignedinteger[Any]]
Element = TypeVar("Element", bound=np.generic)


def record_key(record: Record) -> Key:
    """The key of the logical value that a record is a piece of; per-rank roles have one value a rank."""
    fqn = f"rank{record.rank}.{record.fqn}" if record.role in PER_RANK_ROLES else record.fqn
    return Key(record.op, record.where, record.role, fqn)


def assemble(records: Iterable[Record]) -> tuple[Logical, list[Problem]]:
    """Join pieces into whole values, in the order in which their keys first appear.

    Returns:
        The values, and what is wrong with the pieces. A key with a `dtype`, `shape`, `size` or `gap` problem
        has no value. After a `replica_conflict` the value holds the bits that most ranks have (of equally
        many, those of the lowest rank), after an `overlap` those of the lowest rank.
    """
    groups: dict[tuple[int, str, str, str], list[Record]] = {}
    everything = list(records)
    for identity, record in zip(map(_identity, everything), everything, strict=True):
        if identity in groups:
            groups[identity].append(record)
        else:
            groups[identity] = [record]
    logical: Logical = {}
    problems: list[Problem] = []
    for identity, pieces in groups.items():
        if identity[2] in PER_RANK_ROLES:
            for key, own in _by_rank(pieces):
                _add(key, own, logical, problems)
        else:
            _add(Key._make(identity), pieces, logical, problems)
    return logical, problems


def _add(key: Key, pieces: list[Record], logical: Logical, problems: list[Problem]) -> None:
    if pieces[-1].replica or pieces[0].replica:
        _add_copies(key, pieces, logical, problems)
        return
    value = _join_sound(pieces)
    if value is None:
        value, found = _Inspection(key, list(every_rank(pieces))).result()
        problems.extend(found)
    if value is not None:
        logical[key] = value


def _add_copies(key: Key, pieces: list[Record], logical: Logical, problems: list[Problem]) -> None:
    """Join copies that are cut differently. Each is assembled by itself; the first one's value is kept, and the
    others must equal it."""
    copies: dict[int, list[Record]] = {}
    for piece in every_rank(pieces):
        copies.setdefault(piece.replica, []).append(piece._replace(replica=0))
    first: Logical = {}
    for replica, own in copies.items():
        joined: Logical = {}
        _add(key, own, joined, problems)
        if first and joined and first != joined:
            detail = f"copy {replica}, on ranks {_ranks(own)}, differs from copy {next(iter(copies))}"
            problems.append(Problem(key, "replica_conflict", tuple(_ranks(own)), detail))
        first = first or joined
    logical.update(first)


def _by_rank(pieces: list[Record]) -> Iterable[tuple[Key, list[Record]]]:
    grouped: dict[Key, list[Record]] = {}
    for piece in pieces:
        grouped.setdefault(record_key(piece), []).append(piece)
    return grouped.items()


def _join_sound(pieces: list[Record]) -> Value | None:
    """The value of pieces without any problem that are whole tensors, rows or flat intervals; else None.

    This is the hot path, about half a microsecond a piece: a whole matrix of scenarios passes here.
    """
    first = pieces[0]
    dtype, shape, data = first.dtype, first.shape, first.data
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        return None
    total = prod(shape) * itemsize
    if len(data) == total and first.size == shape and not first.flat:
        content = first[_CONTENT]
        if len(pieces) == 1 or all(piece[_CONTENT] == content for piece in pieces):
            return None if any(first.start) or len(first.start) != len(shape) else Value(dtype, shape, data)
    return _join_intervals(pieces, dtype, shape, itemsize, total) if shape else None


def _join_intervals(
    pieces: list[Record], dtype: str, shape: tuple[int, ...], itemsize: int, total: int
) -> Value | None:
    inner = shape[1:]
    row_bytes = prod(inner) * itemsize
    origin = (0,) * len(inner)
    parts: dict[int, bytes] = {}
    for _, _, _, _, _, own_dtype, own_shape, start, size, data, flat, _, _ in pieces:
        if own_dtype != dtype or own_shape != shape:
            return None
        if flat:
            if len(start) != 1 or len(size) != 1:
                return None
            unit = itemsize
        elif size[1:] == inner and start[1:] == origin:
            unit = row_bytes
        elif not data and 0 in size and inside(shape, Box(start, size)):
            continue
        else:
            return None
        at = start[0] * unit
        if len(data) != size[0] * unit or at < 0 or at + len(data) > total:
            return None
        if data and parts.setdefault(at, data) != data:
            return None
    end = 0
    ordered = sorted(parts)
    for at in ordered:
        if at != end:
            return None
        end += len(parts[at])
    if end != total or not total:
        return None
    return Value(dtype, shape, b"".join([parts[at] for at in ordered]))


@dataclass
class _Inspection:
    """All checks on the pieces of one value, for those that the hot path did not accept."""

    key: Key
    pieces: list[Record]

    def result(self) -> tuple[Value | None, list[Problem]]:
        """The value, if the pieces determine one, and the problems found."""
        unfit = self._dtype_and_shape() or self._sizes()
        if unfit:
            return None, unfit
        first = self.pieces[0]
        bits, covered, problems = self._fill()
        if not covered.all():
            missing = int(covered.size - np.count_nonzero(covered))
            at = multi_index(first.shape, int(np.argmin(covered.reshape(-1))))
            detail = f"{missing} of {covered.size} elements are on no rank, the first at {list(at)}"
            return None, [*problems, self._problem("gap", self.pieces, detail)]
        return Value(first.dtype, first.shape, bits.tobytes()), problems

    def _problem(self, kind: str, pieces: Iterable[Record], detail: str) -> Problem:
        return Problem(self.key, kind, tuple(sorted({p.rank for p in pieces})), detail)

    def _dtype_and_shape(self) -> list[Problem]:
        problems = []
        for kind in ("dtype", "shape"):
            held: dict[object, list[Record]] = {}
            for piece in self.pieces:
                held.setdefault(getattr(piece, kind), []).append(piece)
            if len(held) > 1:
                detail = "; ".join(f"{value} on ranks {_ranks(some)}" for value, some in held.items())
                problems.append(self._problem(kind, self.pieces, detail))
        if not problems and self.pieces[0].dtype not in ITEMSIZE:
            problems.append(self._problem("dtype", self.pieces, f"unknown dtype {self.pieces[0].dtype!r}"))
        return problems

    def _sizes(self) -> list[Problem]:
        problems = []
        for piece in self.pieces:
            box = Box(piece.start, piece.size)
            domain = (prod(piece.shape),) if piece.flat else piece.shape
            needed = box.volume * ITEMSIZE[piece.dtype]
            if not inside(domain, box):
                detail = f"rank {piece.rank} holds {_describe(piece)}, which is not inside {list(domain)}"
                problems.append(self._problem("size", [piece], detail))
            elif len(piece.data) != needed:
                detail = f"rank {piece.rank} has {len(piece.data)} bytes for {_describe(piece)}, which takes {needed}"
                problems.append(self._problem("size", [piece], detail))
        return problems

    def _fill(self) -> tuple[Bits, npt.NDArray[np.bool_], list[Problem]]:
        """The tensor's bits, which elements some rank holds, and conflicts and overlaps on the way."""
        first = self.pieces[0]
        bits = np.zeros(first.shape, _BITS[ITEMSIZE[first.dtype]])
        covered = np.zeros(first.shape, np.bool_)
        problems: list[Problem] = []
        placed: list[Record] = []
        for replicas in self._replicas():
            agreed = _majority(replicas)
            deviating = [p for p in replicas if p.data != agreed.data]
            if deviating:
                problems.append(self._problem("replica_conflict", deviating, _conflict(replicas, agreed, deviating)))
            region, taken = _region(bits, agreed), _region(covered, agreed)
            if taken.any():
                problems.append(self._overlap(replicas, placed))
            region[~taken] = as_bits(agreed).reshape(region.shape)[~taken]
            taken[...] = True
            placed.append(agreed)
        return bits, covered, _first_of_each_kind(problems)

    def _replicas(self) -> list[list[Record]]:
        """Pieces with elements, grouped by box, each group and its members by rank."""
        groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Record]] = {}
        for piece in sorted(self.pieces, key=lambda p: p.rank):
            flat_whole = piece.flat and piece.size == (prod(piece.shape),)
            box = ((0,) * len(piece.shape), piece.shape) if flat_whole else (piece.start, piece.size)
            if piece.data:
                groups.setdefault(box, []).append(piece)
        return list(groups.values())

    def _overlap(self, replicas: list[Record], placed: Sequence[Record]) -> Problem:
        """One box against those placed before it that share elements with it."""
        piece = replicas[0]
        mine = set(elements_of(piece).tolist())
        others = [p for p in placed if not mine.isdisjoint(elements_of(p).tolist())]
        detail = (
            f"rank {piece.rank} holds {_describe(piece)}, rank {others[0].rank} {_describe(others[0])}: they overlap"
        )
        return self._problem("overlap", [*replicas, *others], detail)


_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_bits(piece: Record | Value) -> Bits:
    """The raw bit patterns of a piece or value, shape (elements,), unsigned integers of its item size."""
    return np.frombuffer(piece.data, _BITS[ITEMSIZE[piece.dtype]])


def _region(whole: npt.NDArray[Element], piece: Record) -> npt.NDArray[Element]:
    """The view of `whole` (contiguous, of the piece's logical shape) that a piece fills."""
    if piece.flat:
        return whole.reshape(-1)[piece.start[0] : piece.start[0] + piece.size[0]]
    where: tuple[Any, ...] = tuple(slice(at, at + n) for at, n in zip(piece.start, piece.size, strict=True))
    return whole[(*where, ...)]  # the ellipsis keeps a scalar an array


def elements_of(piece: Record) -> npt.NDArray[np.int64]:
    """The flat indices, in the logical tensor, of a piece's elements, in the order of its data."""
    numbers = np.arange(prod(piece.shape), dtype=np.int64).reshape(piece.shape)
    return _region(numbers, piece).reshape(-1)


def _majority(replicas: list[Record]) -> Record:
    votes: dict[bytes, list[Record]] = {}
    for piece in replicas:
        votes.setdefault(piece.data, []).append(piece)
    return max(votes.values(), key=len)[0]


def _conflict(replicas: list[Record], agreed: Record, deviating: list[Record]) -> str:
    other = deviating[0]
    differing = np.flatnonzero(as_bits(other) != as_bits(agreed))
    at = multi_index(agreed.shape, int(elements_of(agreed)[differing[0]]))
    agreeing = [p for p in replicas if p.data == agreed.data]
    return (
        f"{_describe(agreed)}: ranks {_ranks(deviating)} differ from ranks {_ranks(agreeing)}; rank {other.rank} in "
        f"{differing.size} of {len(as_bits(agreed))} elements, the first at {list(at)}"
    )


def _first_of_each_kind(problems: list[Problem]) -> list[Problem]:
    """One problem of each kind, with all ranks involved and the detail of the first."""
    merged: dict[str, Problem] = {}
    for problem in problems:
        first = merged.get(problem.kind, problem)
        ranks = tuple(sorted({*first.ranks, *problem.ranks}))
        merged[problem.kind] = Problem(first.key, first.kind, ranks, first.detail)
    return list(merged.values())


def _ranks(pieces: Iterable[Record]) -> list[int]:
    return sorted({p.rank for p in pieces})


def _describe(piece: Record) -> str:
    """The elements a piece fills, as one would write the slice."""
    ends = (f"{at}:{at + n}" for at, n in zip(piece.start, piece.size, strict=False))
    return f"{'flat ' if piece.flat else ''}[{', '.join(ends)}]"
