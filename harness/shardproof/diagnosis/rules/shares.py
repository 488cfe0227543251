"""Rules for loads that mixed up the shards which ranks had saved, where the saved values cannot be inspected: a state
dict that is kept in memory.

Of a checkpoint on disk the pieces are read, and `shardproof.diagnosis.rules.pieces` says which of them lie. Of a state
dict only the tensors are seen that a load makes of it. Then the shares that ranks held when it was taken tell: a tensor
that holds one rank's share at its beginning, and zeros behind it, was saved as if that share were the whole.

*Verifies*: bits, in at least three different elements; and of what is lost, that it is exactly what the rule names.
*Does not verify*: whether the save or the load made the mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.arrangement import DISTINCT, distinct
from shardproof.diagnosis.explanation import Context, Finding, tensor
from shardproof.diff import Difference
from shardproof.observe.assemble import Bits, as_bits, elements_of, record_key
from shardproof.observe.logical import Key
from shardproof.observe.record import Record
from shardproof.program import TAKES


def shares(key: Key, context: Context) -> list[Record]:
    """What each rank owned of a live value when the state was taken that a load restored; empty if no load did."""
    taken = next((i for i in range(key.op - 1, -1, -1) if _kind(i, context) in TAKES), None)
    if key.where != "live" or taken is None or not context.op_kind(key.op).startswith("load"):
        return []
    return [piece for piece in context.pieces(key._replace(op=taken)) if piece.data]


def _kind(index: int, context: Context) -> str:
    op = context.op(index)
    return op.kind if op else ""


def filed_as_whole(difference: Difference, context: Context) -> Finding | None:
    """A tensor has one rank's share at its beginning, and nothing but zeros elsewhere (TE-2795: each rank saves its
    share as if it were the whole)."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or not pair.is_float or pair.strength != "certain":
        return None
    wanted, got = as_bits(pair.expected), as_bits(pair.observed)
    for piece in shares(key, context):
        if piece.shape != pair.expected.shape or not any(piece.start):
            continue
        own, first = elements_of(piece), elements_of(piece._replace(start=(0,) * len(piece.start)))
        rest = np.ones(len(got), bool)
        rest[first] = False
        if np.array_equal(got[first], wanted[own]) and distinct(got[first]) >= DISTINCT and not got[rest].any():
            clause = f"{tensor(key)} after {context.op_name(key.op)} has the share of rank {piece.rank}, which is from "
            clause += f"element {own[0]} on, at its beginning, and zeros elsewhere"
            return Finding("certain", clause, {"name": key.fqn, "rank": piece.rank, "elements": len(own)})
    return None


def empty_share_restored(difference: Difference, context: Context) -> Finding | None:
    """What is zero after a load is the last share of exactly those tensors of which some rank owns nothing (PT-150862:
    of the empty share and the real one, which have one offset, the empty one was kept)."""
    key, pair = difference.key, context.pair(difference)
    if pair is None or pair.observed_bits.any():
        return None
    lost, empty = _lost(key, context), _with_empty_shares(key, context)
    if set(lost) != set(empty) or not empty:
        return None
    for fqn, at in lost.items():
        held = [elements_of(piece) for piece in shares(key._replace(fqn=fqn), context)]
        if not held or not np.array_equal(at, max(held, key=lambda part: int(part[0]))):
            return None
    clause = f"{len(pair.at)} of {difference.total} elements of {tensor(key)}, of which ranks {empty[key.fqn]} own "
    clause += f"nothing, are zero after {context.op_name(key.op)}"
    return Finding("likely", clause, {"name": key.fqn, "empty_on": empty[key.fqn]})


def _lost(key: Key, context: Context) -> dict[str, npt.NDArray[np.intp]]:
    """For every parameter whose state in one role deviates, the flat indices of the deviating elements."""
    found = {}
    for fqn, value in context.of_role(key).items():
        held = context.observed.get(key._replace(fqn=fqn))
        if held is not None and held != value and (held.dtype, held.shape) == (value.dtype, value.shape):
            found[fqn] = np.flatnonzero(as_bits(held) != as_bits(value))
    return found


def _with_empty_shares(key: Key, context: Context) -> dict[str, list[int]]:
    """For every parameter with state in one role, the ranks whose shard of the parameter is empty; parameters without
    empty shards are left out."""
    op = context.op(key.op)
    every = set(range(op.mesh.world)) if op else set()
    names = context.of_role(key)
    owners = {fqn: {piece.rank for piece in shares(key._replace(fqn=fqn), context)} for fqn in names}
    return {fqn: sorted(every - own) for fqn, own in owners.items() if own and every - own}


def share_of_another_rank(difference: Difference, context: Context) -> Finding | None:
    """All that a rank owns of a role is what another rank must own, in that order, and the other one has its own
    (DS-5681, DS-2059: a share of a flat buffer was cut with the number of another rank)."""
    key, moved = difference.key, {}
    if key.where != "live" or context.pair(difference) is None:
        return None
    having = tuple(sorted({piece.rank for piece in context.pieces(key) if piece.data}))
    for rank in having:
        right = _which_are_right(rank, key, context)
        pieces = zip(_held_by(key, context)[rank], right, strict=True)
        if any(piece.fqn == key.fqn and not of_piece for piece, of_piece in pieces):
            found = partial(_whose_share, rank, having, key, context)
            moved[rank] = context.once(("whose share", key[:3], rank, having), found)
    if not moved or None in moved.values():
        return None
    told = ", ".join(f"rank {rank} has rank {of}'s" for rank, of in moved.items())
    clause = f"of all {key.role} that a rank owns, {told}, after {context.op_name(key.op)}"
    return Finding("certain", clause, {"name": key.fqn, "role": key.role, "ranks": list(moved)})


def _held_by(key: Key, context: Context) -> dict[int, list[Record]]:
    """Rank → what it holds of a role after an operation."""

    def make() -> dict[int, list[Record]]:
        held: dict[int, list[Record]] = {}
        for name in context.of_role(key):
            for piece in context.pieces(key._replace(fqn=name)):
                if piece.data:
                    held.setdefault(piece.rank, []).append(piece)
        return held

    return context.once(("what ranks hold", key[:3]), make)


def _whose_share(rank: int, others: Sequence[int], key: Key, context: Context) -> int | None:
    """The rank of some whose share of a role another rank holds."""
    held = _held_by(key, context)
    if any(_which_are_right(rank, key, context)):
        return None
    right = (other for other in others if other != rank and all(_which_are_right(other, key, context)))
    return next((other for other in right if _are_those_of(held[rank], other, key, context)), None)


def _right(piece: Record, context: Context) -> bool:
    return np.array_equal(as_bits(piece), _due(piece, context))


def _which_are_right(rank: int, key: Key, context: Context) -> list[bool]:
    """Of each piece of a role that a rank holds, whether it is right."""
    held = _held_by(key, context)[rank]
    return context.once(("right", key[:3], rank), lambda: [_right(piece, context) for piece in held])


def _due(piece: Record, context: Context) -> Bits:
    """The bits that a piece must have."""
    expected = context.expected[record_key(piece)]
    return as_bits(expected)[elements_of(piece)] if expected.dtype == piece.dtype else as_bits(piece)[:0]


def _are_those_of(pieces: Sequence[Record], other: int, key: Key, context: Context) -> bool:
    """Whether pieces hold, one run after the other, what a role's of another rank must."""

    def make() -> tuple[dict[int, tuple[int, int]], list[int]]:
        due = [_due(piece, context) for piece in _held_by(key, context)[other]]
        places = {bits: (n, at) for n, part in enumerate(due) for at, bits in enumerate(part.tolist())}
        return places, [len(part) for part in due]

    places, sizes = context.once(("what lies where", key[:3], other), make)
    for piece in pieces:
        found = [places.get(bits) for bits in as_bits(piece).tolist()]
        if None in found or not all(_next(a, b, sizes) for a, b in pairwise(found)):
            return False
    return len({bits for piece in pieces for bits in as_bits(piece).tolist()}) >= DISTINCT


def _next(one: tuple[int, int] | None, other: tuple[int, int] | None, sizes: Sequence[int]) -> bool:
    """Whether one element, as number of a piece and place in it, follows another: in the piece, or as the first of one
    behind the last of another."""
    if one is None or other is None:
        return False
    next_piece = other[0] != one[0] and other[1] == 0
    return other == (one[0], one[1] + 1) or (next_piece and one[1] == sizes[one[0]] - 1)
