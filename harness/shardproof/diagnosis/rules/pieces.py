"""Rules that look at the pieces of a tensor rank by rank, for example to find a rank that holds another rank's shard,
or a shard cut in the wrong coordinates.

A whole tensor is joined from what each rank holds, at the place that it says it has. So a mistake that every rank makes
with its own part shows in the pieces, and may leave no pattern in the whole, or no whole at all. For example, four
ranks hold 36 elements each of two experts' weights, and ranks 2 and 3 have the bits that ranks 0 and 1 must have: the
offset was computed with the rank of another group.

*Verifies*: bits. A piece that is recognised holds exactly what must be at the place that is named, in at least three
different elements.
*Does not verify*: why the place was mistaken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.arrangement import DISTINCT, distinct
from shardproof.diagnosis.explanation import Context, Finding, Pair, Rule, tensor
from shardproof.diagnosis.rules.shares import empty_share_restored, filed_as_whole, share_of_another_rank
from shardproof.diff import Difference
from shardproof.observe.assemble import Bits, as_bits, elements_of
from shardproof.observe.logical import Key, Value
from shardproof.observe.record import Record

OWNED = ("master", "exp_avg", "momentum", "param")
"""Roles whose pieces say which rank owns which elements, the surest first: the parameters of flat buffers lie whole on
every rank."""


def other_rank(difference: Difference, context: Context) -> Finding | None:
    """What some ranks own is what other ranks own, of another parameter in another part of one buffer, and must not be
    there (DS-5681, DS-2059: an offset computed with the rank of another group).

    An exchange of names is no case of this: there the other parameter is wrong too, or lies on the same ranks.
    """
    pair, key = context.pair(difference), difference.key
    if pair is None or key.role not in OWNED:
        return None
    return _part_of_another(difference, pair, context) or share_of_another_rank(difference, context)


def _part_of_another(difference: Difference, pair: Pair, context: Context) -> Finding | None:
    key = difference.key
    own = _owners(key, context)
    wanted, got = as_bits(pair.expected), as_bits(pair.observed)
    for other, value in context.siblings(key):
        if context.observed.get(other) != value or value.dtype != pair.expected.dtype:
            continue
        theirs = _owners(other, context)
        if {rank for rank, _ in own} & {rank for rank, _ in theirs}:
            continue
        source = as_bits(value)
        moved = {
            rank: next((o for o, part in theirs if np.array_equal(got[at], source[part])), None)
            for rank, at in own
            if not np.array_equal(got[at], wanted[at])
        }
        if moved and None not in moved.values() and distinct(pair.observed_bits) >= DISTINCT:
            held = ", ".join(f"rank {rank} has rank {of}'s" for rank, of in moved.items())
            clause = f"of {tensor(key)} {held}, which is of {other.fqn}, after {context.op_name(key.op)}"
            return Finding("certain", clause, {"name": key.fqn, "holds": other.fqn, "ranks": list(moved)})
    return None


def _owners(key: Key, context: Context) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """`(rank, flat indices)` of the parts in which a parameter is owned; empty if no rank owns less than all of it."""
    return context.once(("owners", key.op, key.fqn), partial(_owners_of, key, context))


def _owners_of(key: Key, context: Context) -> list[tuple[int, npt.NDArray[np.int64]]]:
    for role in OWNED:
        held = [p for p in context.pieces(key._replace(role=role, where="live")) if p.data]
        parts = [(piece.rank, elements_of(piece)) for piece in held]
        if parts and all(len(at) < prod(held[0].shape) for _, at in parts):
            return parts
    return []


def other_offset(difference: Difference, context: Context) -> dict[int, tuple[int, int, int]] | None:
    """Rank → `(first, last, source)`: which of a tensor's elements it has from which other place of the same tensor.

    None unless every rank that deviates holds one stretch of the tensor at a wrong place.
    """
    pair = context.pair(difference)
    found: dict[int, tuple[int, int, int]] = {}
    for piece in context.pieces(difference.key) if pair is not None else ():
        assert pair is not None
        wanted, at = as_bits(pair.expected), elements_of(piece)
        if piece.dtype != pair.expected.dtype or len(at) * wanted.itemsize != len(piece.data):
            return None
        own = as_bits(piece)
        unlike = np.flatnonzero(own != wanted[at])
        if not len(unlike):
            continue
        window = own[unlike[0] : unlike[-1] + 1]
        source = position(window, pair.expected)
        if source is None or distinct(window) < DISTINCT:
            return None
        found[piece.rank] = (int(at[unlike[0]]), int(at[unlike[-1]]), source)
    return found or None


def position(window: Bits, value: Value) -> int | None:
    """Where a stretch begins in a value, in elements; None if it is nowhere."""
    at = value.data.find(window.tobytes())
    while at >= 0 and at % window.itemsize:
        at = value.data.find(window.tobytes(), at + 1)
    return at // window.itemsize if at >= 0 else None


def exchanged_in_parts(difference: Difference, context: Context) -> tuple[int, int] | None:
    """The two dims whose exchange, in each rank's own box, makes what that rank holds; None if not in every part that
    deviates."""
    pair = context.pair(difference)
    if pair is None or len(pair.expected.shape) < 2:
        return None
    whole = as_bits(pair.expected)
    turned: set[tuple[int, int]] = set()
    for piece in context.pieces(difference.key):
        if piece.flat or piece.dtype != pair.expected.dtype:
            return None
        wanted, own = whole[elements_of(piece)].reshape(piece.size), as_bits(piece)
        if own.size != wanted.size:
            return None
        if np.array_equal(wanted.reshape(-1), own):
            continue
        dims = [
            (a, b) for a, b in pairwise(range(wanted.ndim)) if np.array_equal(wanted.swapaxes(a, b).reshape(-1), own)
        ]
        if not dims or distinct(own) < DISTINCT:
            return None
        turned.add(dims[0])
    return turned.pop() if len(turned) == 1 else None


def halves_of_a_part(difference: Difference, context: Context) -> Finding | None:
    """A fused weight was taken apart at the half of what a rank holds: two stretches that follow each other in the
    weight are filed half a weight apart (MLM-4423: the layout of the shard, in the coordinates of the whole)."""
    key, expected = difference.key, context.expected.get(difference.key)
    if key.where != "written" or expected is None:
        return None
    by_rank: dict[int, list[tuple[int, int, int]]] = {}
    for piece in context.pieces(key):
        held = _held_from(piece, expected) if _is_run(piece) else None
        if held is not None:
            by_rank.setdefault(piece.rank, []).append((_begin(piece), held, len(as_bits(piece))))
    half = prod(expected.shape) // 2
    for rank, parts in sorted(by_rank.items()):
        for (at, held, length), (next_at, next_held, _) in pairwise(sorted(parts)):
            if held + length == next_held and at + half == next_at and length != half:
                clause = f"rank {rank} filed the elements from {held} on and from {next_held} on, which follow each "
                clause += f"other in {tensor(key)}, at {at} and {next_at}, after {context.op_name(key.op)}"
                evidence = {"name": key.fqn, "rank": rank, "filed_at": [at, next_at], "hold": [held, next_held]}
                return Finding("certain", clause, evidence)
    return None


def _held_from(piece: Record, expected: Value) -> int | None:
    """From which element of a tensor on a piece holds what it holds, by its bits."""
    own = as_bits(piece)
    if piece.dtype != expected.dtype or distinct(own) < DISTINCT:
        return None
    return position(own, expected)


PARTS = ("gap", "overlap", "size", "bits", "replica_conflict")
"""What is found of a tensor of which some part is described as lying elsewhere."""


def wrong_coordinates(difference: Difference, context: Context) -> Finding | None:
    """Pieces of a checkpoint say that they lie elsewhere than what they hold must lie (TE-2795, PT-110762); or a state
    dict does, by what a load makes of it."""
    key, expected = difference.key, context.expected.get(difference.key)
    if key.where == "live":
        return filed_as_whole(difference, context)
    if key.where != "written" or expected is None or difference.kind not in PARTS:
        return None
    moved = []
    for piece in context.pieces(key):
        held = _held_from(piece, expected) if _is_run(piece) else None
        if held is not None and (at := _begin(piece)) != held:
            moved.append((piece.rank, at, held))
    if not moved:
        return None
    told = ", ".join(f"rank {rank} says {at} and holds what is at {held}" for rank, at, held in moved[:3])
    clause = f"of {tensor(key)} after {context.op_name(key.op)}, in elements, {told}{', …' if len(moved) > 3 else ''}"
    return Finding("certain", clause, {"name": key.fqn, "moved": [list(m) for m in moved]})


def _is_run(piece: Record) -> bool:
    """Whether a piece's elements follow each other in the whole tensor: a box that is whole in all dims but the
    first."""
    return bool(piece.data) and (piece.flat or tuple(piece.size[1:]) == tuple(piece.shape[1:]))


def _begin(piece: Record) -> int:
    return piece.start[0] if piece.flat else _flat_start(piece.start, piece.shape)


def _flat_start(start: Sequence[int], shape: Sequence[int]) -> int:
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return sum(at * stride for at, stride in zip(start, strides, strict=True))


def empty_part_kept(difference: Difference, context: Context) -> Finding | None:
    """What a checkpoint lacks is what some ranks hold nothing of: of the empty part and the real one, which have one
    offset, the empty one was kept (PT-150862).

    Shown by the whole save: nothing else of the role is missing, and all of which some rank holds nothing is.
    """
    key = difference.key
    if key.where == "live":
        return empty_share_restored(difference, context)
    if difference.kind not in ("missing", "gap"):
        return None
    lost = {fqn for fqn in context.of_role(key) if key._replace(fqn=fqn) not in context.observed}
    empty = {fqn: _without(key._replace(fqn=fqn), context) for fqn in context.of_role(key)}
    if key.fqn not in lost or lost != {fqn for fqn, ranks in empty.items() if ranks} or len(lost) == len(empty):
        return None
    ranks = empty[key.fqn]
    clause = f"{tensor(key)}, of which ranks {ranks} hold nothing, is not in the checkpoint of "
    return Finding("likely", f"{clause}{context.op_name(key.op)}", {"name": key.fqn, "empty_on": ranks})


def _without(key: Key, context: Context) -> list[int]:
    """The ranks that own something of the role and nothing of this value."""
    owned: dict[str, set[int]] = {}
    for fqn in context.of_role(key):
        pieces = context.pieces(key._replace(where="live", fqn=fqn))
        owned[fqn] = {p.rank for p in pieces if p.data}
    return sorted(set().union(*owned.values()) - owned.get(key.fqn, set()))


FIRST = (
    Rule("halves_of_a_part", "A fused weight was cut at the half of a shard", halves_of_a_part, ("MLM-4423",)),
    Rule(
        "empty_part_kept",
        "What the checkpoint lacks is what some ranks own nothing of: their empty shards were kept",
        empty_part_kept,
        ("PT-150862",),
    ),
    Rule("other_rank", "Ranks hold what belongs to other ranks", other_rank, ("DS-5681", "DS-2059")),
)
"""Before the rules about whole tensors: what these find shows there as a gap, or as another parameter's values."""

RULES = (
    Rule(
        "wrong_coordinates",
        "Pieces of a checkpoint are described in wrong coordinates",
        wrong_coordinates,
        ("TE-2795", "PT-110762", "MLM-7162", "TT-4593", "AO-1269"),
    ),
)
