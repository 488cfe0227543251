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
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardproof.layout import Box, inside, multi_index
from shardproof.observe.logical import Key, Logical, Problem, Value
from shardproof.observe.record import ITEMSIZE, PER_RANK_ROLES, Record, every_rank
from shardproof.observe.settings import lines_apart

_identity = itemgetter(*(Record._fields.index(name) for name in Key._fields))
_replica = itemgetter(Record._fields.index("replica"))
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
    for record in records:
        groups.setdefault(_identity(record), []).append(record)
    logical: Logical = {}
    problems: list[Problem] = []
    for identity, pieces in groups.items():
        keyed = _by_rank(pieces) if identity[2] in PER_RANK_ROLES else ((Key._make(identity), pieces),)
        for key, own in keyed:
            cut_apart = any(map(_replica, own))  # first and last may be of ranks that have no copy
            value = (_joined_copies if cut_apart else _joined)(key, own, problems)
            if value is not None:
                logical[key] = value
    return logical, problems


def _joined(key: Key, pieces: list[Record], problems: list[Problem]) -> Value | None:
    """Join pieces from several ranks into one value. Returns None and appends problems, such as gaps or conflicting
    replicas, if the pieces do not determine a value."""
    value = _join_sound(pieces)
    if value is None:
        value, found = _Inspection(key, list(every_rank(pieces))).result()
        problems.extend(found)
    return value


def _joined_copies(key: Key, pieces: list[Record], problems: list[Problem]) -> Value | None:
    """Join copies that are cut differently. Each is assembled by itself; the first one's value is kept, and the
    others must equal it."""
    copies: dict[int, list[Record]] = {}
    for piece in pieces:
        copies.setdefault(piece.replica, []).append(piece)
    first: Value | None = None
    for replica, own in copies.items():
        value = _joined(key, own, problems)
        if first is not None and value is not None and first != value:
            ranks = _ranks(every_rank(own))
            detail = f"copy {replica}, on ranks {ranks}, differs from copy {next(iter(copies))}"
            problems.append(Problem(key, "replica_conflict", tuple(ranks), detail))
        first = value if first is None else first
    return first


def _by_rank(pieces: list[Record]) -> Iterable[tuple[Key, list[Record]]]:
    grouped: dict[Key, list[Record]] = {}
    for piece in pieces:
        grouped.setdefault(record_key(piece), []).append(piece)
    return grouped.items()


def _join_sound(pieces: list[Record]) -> Value | None:
    """The value of pieces without any problem; None where there is one, or where it takes a closer look to tell.

    This is the hot path: a whole matrix of scenarios passes here, thousands of values of a few ways to cut a tensor.
    So what the boxes come to is worked out once for each way (`_cut`); what is left to do for a value is to see that
    ranks with the same box have the same bytes, and to join them.
    """
    first = pieces[0]
    dtype, shape, data = first.dtype, first.shape, first.data
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        return None
    if first.size == shape and not first.flat and len(data) == prod(shape) * itemsize:
        content = first[_CONTENT]
        if len(pieces) == 1 or all(piece[_CONTENT] == content for piece in pieces):
            return None if any(first.start) or len(first.start) != len(shape) else Value(dtype, shape, data)
    parts: dict[_Place, bytes] = {}
    for _, _, _, _, _, own_dtype, own_shape, start, size, data, flat, _, _ in pieces:
        if own_dtype != dtype or own_shape != shape or parts.setdefault((start, size, flat), data) != data:
            return None
    cut = _cut(shape, tuple(parts))
    if cut is None or [len(data) for data in parts.values()] != [n * itemsize for n in cut.volumes]:
        return None
    joined = b"".join(parts.values())
    if cut.order is not None:
        joined = np.frombuffer(joined, _BITS[itemsize])[cut.order].tobytes()
    return Value(dtype, shape, joined)


_Place = tuple[tuple[int, ...], tuple[int, ...], bool]
"""Start and size of a box, and whether it is one of the flattened tensor."""


class _Cut(NamedTuple):
    """A way to cut a tensor up. volumes: elements of each box. order: of each element of the tensor, row-major, its
    position in the boxes' elements one after the other; None where it is the same."""

    volumes: tuple[int, ...]
    order: npt.NDArray[np.int64] | None


@lru_cache(maxsize=4096)
def _cut(shape: tuple[int, ...], places: tuple[_Place, ...]) -> _Cut | None:
    """Boxes that share no element and together are a tensor of that shape; None if they are not, or if it is empty."""
    total = prod(shape)
    if not total or not all(inside((total,) if flat else shape, Box(start, size)) for start, size, flat in places):
        return None
    numbers = np.arange(total).reshape(shape)
    boxes = [_region(numbers, start, size, flat).reshape(-1) for start, size, flat in places]
    position = np.concatenate(boxes)
    order = np.argsort(position, kind="stable")
    if position.size != total or not np.array_equal(position[order], np.arange(total)):
        return None
    same = np.array_equal(order, np.arange(total))
    return _Cut(tuple(box.size for box in boxes), None if same else order)


@dataclass
class _Inspection:
    """All checks on the pieces of one value, for those that the hot path did not accept."""

    key: Key
    pieces: list[Record]

    def result(self) -> tuple[Value | None, list[Problem]]:
        """The value, if the pieces determine one, and the problems found."""
        if all(map(_is_whole_text, self.pieces)):
            return self._text()
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

    def _text(self) -> tuple[Value, list[Problem]]:
        """The text that most ranks have, as one value however long it is. A conflict tells the text of each rank."""
        pieces = sorted(self.pieces, key=lambda p: p.rank)
        agreed, held = _majority(pieces), dict[bytes, list[Record]]()
        for piece in pieces:
            held.setdefault(piece.data, []).append(piece)
        value = Value(agreed.dtype, agreed.shape, agreed.data)
        if len(held) == 1:
            return value, []
        texts = lines_apart([data.decode("utf-8", "replace") for data in held])
        told = (f"{text} on {_on(_ranks(some))}" for text, some in zip(texts, held.values(), strict=True))
        deviating = [piece for piece in pieces if piece.data != agreed.data]
        return value, [self._problem("replica_conflict", deviating, ", ".join(told))]

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
            place = agreed.start, agreed.size, agreed.flat
            region, taken = _region(bits, *place), _region(covered, *place)
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
        """Describe the overlap between a box and the boxes that were placed earlier and share elements with it."""
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


def _region(
    whole: npt.NDArray[Element], start: tuple[int, ...], size: tuple[int, ...], flat: bool
) -> npt.NDArray[Element]:
    """The view of `whole` (contiguous, of the logical shape) that a box fills."""
    if flat:
        return whole.reshape(-1)[start[0] : start[0] + size[0]]
    where: tuple[Any, ...] = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
    return whole[(*where, ...)]  # the ellipsis keeps a scalar an array


def elements_of(piece: Record) -> npt.NDArray[np.int64]:
    """The flat indices, in the logical tensor, of a piece's elements, in the order of its data."""
    numbers = np.arange(prod(piece.shape), dtype=np.int64).reshape(piece.shape)
    return _region(numbers, piece.start, piece.size, piece.flat).reshape(-1)


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
    where = f"{differing.size} of {len(as_bits(agreed))} elements, the first at {list(at)}"
    if not {*_ranks(deviating)} - {*_ranks(agreeing)}:
        return f"{_describe(agreed)}: {_who(_ranks(deviating))} several copies that differ in {where}"
    return (
        f"{_describe(agreed)}: ranks {_ranks(deviating)} differ from ranks {_ranks(agreeing)}; rank {other.rank} in "
        f"{where}"
    )


def _is_whole_text(piece: Record) -> bool:
    return piece.dtype == "utf8" and not piece.flat and piece.size == piece.shape == (len(piece.data),)


def _on(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _who(ranks: Sequence[int]) -> str:
    return f"{_on(ranks)} holds" if len(ranks) == 1 else f"each of {_on(ranks)} holds"


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
