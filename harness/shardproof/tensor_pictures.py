"""Keeps the differing elements of tensors so that a reader can look at them: both sides, and which rank holds which
element.

A difference says how many elements deviate and shows the first; a picture of a tensor needs them all. Observations are
in the database, but what was expected is not: an oracle would have to run again. So the judge, which has both sides at
hand, packs them beside its answer (`pack_elements`); the report carries them as they are, and a page draws them.

That is bounded. Of one tensor at most `TENSOR_ELEMENTS` are kept, from the row of the first that deviates on, and of a
failure `FAILURE_BYTES`: first one tensor of every role of the first operation that differs, then the others of that
operation, then what follows from it. What was left out is counted, and the page says so.

The form is one zlib stream of a JSON line and the raw bytes behind it, which a browser unpacks by itself:

    {"left_out": 3, "pictures": [{"op": 8, "where": "live", "role": "exp_avg", "fqn": "up.weight", "first": 0,
      "owners": [{"ranks": [0], "start": [0, 0], "size": [4, 6], "flat": false}, …], "copies": [],
      "expected": {"dtype": "fp32", "shape": [8, 6], "at": 0, "length": 192, "holes": []}, "observed": {…}}, …]}

*Verifies*: nothing; it only keeps.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from shardproof.diff import Difference
from shardproof.layout import flat_index
from shardproof.observe.assemble import as_bits, elements_of, record_key
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import ITEMSIZE, LIVE, Record, every_rank

TENSOR_ELEMENTS = 4096
"""How many elements of one tensor are kept: 64 × 64 can still be told apart on a screen."""

FAILURE_BYTES = 48 << 10
"""How many bytes of elements a failure keeps, both sides together: all of most models here, and a page below 100 kB."""

HOLDERS = 256
"""How many boxes of ranks a tensor lists."""

NOT_DRAWN = ("utf8",)
"""Dtypes that are no numbers: their difference says all there is."""


@dataclass(frozen=True)
class Side:
    """What one side has of a tensor. shape: of the whole tensor. data: of the elements kept, row-major. holes:
    `(start, length)` of elements that no rank holds, in the flattened tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    holes: tuple[tuple[int, int], ...] = ()

    def bits(self, at: int) -> int:
        """The bit pattern of the element `at`, counted from the first one kept.

        Raises:
            IndexError: it is not among them.
        """
        size = ITEMSIZE[self.dtype]
        if not 0 <= at < len(self.data) // size:
            raise IndexError(f"element {at} is not among the {len(self.data) // size} that were kept")
        return int.from_bytes(self.data[at * size : (at + 1) * size], "little")


@dataclass(frozen=True)
class Holder:
    """The ranks that hold one box of a tensor; `flat` as in a `Record`."""

    ranks: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    flat: bool


@dataclass(frozen=True)
class Picture:
    """One tensor. first: flat index of the first element kept. expected, observed: None where a side has nothing.
    owners: who holds what. copies: ranks whose copy is shown as observed, where copies differ."""

    key: Key
    first: int = 0
    expected: Side | None = None
    observed: Side | None = None
    owners: tuple[Holder, ...] = ()
    copies: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of both sides."""
        return sum(len(side.data) for side in (self.expected, self.observed) if side)


@dataclass(frozen=True)
class Elements:
    """What was kept of a failure. left_out: differing tensors that found no place."""

    pictures: tuple[Picture, ...] = ()
    left_out: int = 0
    by_key: Mapping[Key, Picture] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_key", {picture.key: picture for picture in self.pictures})


def pack_elements(
    differences: Sequence[Difference], expected: Logical, observed: Logical, records: Iterable[Record]
) -> bytes:
    """The elements of what differs, packed; empty where there are none to look at.

    Args:
        differences: those that fail, in the order of the report.
        records: the pieces that `observed` was joined from, to say who holds what.
    """
    wanted = _in_turn(differences)
    held = _pieces({key for key, _ in wanted}, records)
    kept: list[Picture] = []
    used = left_out = 0
    first = {d.key: d.first_index for d in reversed(differences) if d.first_index}
    for key, kind in wanted:
        picture = _picture(key, kind, first.get(key, ()), expected, observed, held)
        if picture is None:
            continue
        if used + picture.size > FAILURE_BYTES:
            left_out += 1
            continue
        used += picture.size
        kept.append(picture)
    return _packed(Elements(tuple(kept), left_out)) if kept else b""


def unpack_elements(blob: bytes) -> Elements:
    """What `pack_elements` packed; of what is damaged, nothing: a page without pictures is better than none."""
    try:
        head, _, body = zlib.decompress(blob).partition(b"\n") if blob else (b"{}", b"", b"")
        document = json.loads(head)
        pictures = tuple(_read(item, body) for item in document.get("pictures", ()))
        return Elements(pictures, int(document.get("left_out", 0)))
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError):
        return Elements()


# --- which, and in which order ------------------------------------------------------------------------


def _in_turn(differences: Iterable[Difference]) -> list[tuple[Key, str]]:
    """Keys, and the first kind of difference of each, by operation; of one operation the first tensor of every role,
    then the second of every role, and so on."""
    seen: dict[tuple[int, str, str], int] = {}
    turns: dict[Key, int] = {}
    kinds: dict[Key, str] = {}
    for difference in differences:
        key = difference.key
        if key in kinds or key.op < 0:
            continue
        kinds[key] = difference.kind
        group = (key.op, key.where, key.role)
        turns[key] = seen[group] = seen.get(group, -1) + 1
    return [(key, kinds[key]) for key in sorted(turns, key=lambda key: (key.op, turns[key]))]


def _pieces(wanted: set[Key], records: Iterable[Record]) -> dict[Key, list[Record]]:
    """The pieces of these values, and of the live value of the same name where it is the written one that differs."""
    live = {key._replace(where=LIVE) for key in wanted}
    found: dict[Key, list[Record]] = {}
    for record in every_rank(records):
        key = record_key(record)
        if key in wanted or key in live:
            found.setdefault(key, []).append(record)
    return found


# --- one tensor ---------------------------------------------------------------------------------------


def _picture(
    key: Key, kind: str, first_index: tuple[int, ...], expected: Logical, observed: Logical,
    held: Mapping[Key, list[Record]],
) -> Picture | None:  # fmt: skip
    """The picture of a value; None where neither side has elements to look at."""
    pieces = held.get(key, [])
    wanted, got = expected.get(key), observed.get(key)
    holes: tuple[tuple[int, int], ...] = ()
    copies: tuple[int, ...] = ()
    if got is None:
        got, holes = _incomplete(pieces)
    elif kind == "replica_conflict":
        got, copies = _deviating(got, wanted, pieces)
    sides = [value for value in (wanted, got) if value is not None and _drawn(value)]
    if not sides:
        return None
    shape = sides[0].shape
    alike = len(first_index) == len(shape) and all(0 <= at < n for at, n in zip(first_index, shape, strict=True))
    first = _window(shape, flat_index(shape, first_index) if alike else 0)
    return Picture(
        key, first, _side(wanted, first), _side(got, first, holes),
        _holders(shape, pieces if key.where == LIVE else held.get(key._replace(where=LIVE), [])), copies,
    )  # fmt: skip


def _drawn(value: Value) -> bool:
    return bool(value.data) and value.dtype in ITEMSIZE and value.dtype not in NOT_DRAWN


def _window(shape: tuple[int, ...], deviating: int) -> int:
    """The first element to keep: the first of all if there is room for all, else that of the row that deviates."""
    if prod(shape) <= TENSOR_ELEMENTS:
        return 0
    row = shape[-1] if shape[-1] <= TENSOR_ELEMENTS else 1
    return deviating - deviating % row


def _side(value: Value | None, first: int, holes: tuple[tuple[int, int], ...] = ()) -> Side | None:
    if value is None or not _drawn(value):
        return None
    size = ITEMSIZE[value.dtype]
    return Side(value.dtype, value.shape, value.data[first * size : (first + TENSOR_ELEMENTS) * size], holes)


def _incomplete(pieces: Sequence[Record]) -> tuple[Value | None, tuple[tuple[int, int], ...]]:
    """What ranks hold of a value that is not whole, with its holes; None where the pieces contradict each other."""
    if len({(piece.dtype, piece.shape) for piece in pieces}) != 1 or pieces[0].dtype not in ITEMSIZE:
        return None, ()
    shape, dtype = pieces[0].shape, pieces[0].dtype
    bits = np.zeros(prod(shape), as_bits(pieces[0]).dtype)
    covered = np.zeros(prod(shape), np.bool_)
    for piece in pieces:
        try:
            at = elements_of(piece)
            bits[at] = as_bits(piece)
        except (ValueError, IndexError):
            return None, ()
        covered[at] = True
    edges = np.flatnonzero(np.diff(covered.astype(np.int8), prepend=1, append=1))
    holes = tuple((int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True))
    return Value(dtype, shape, bits.tobytes()), holes


def _deviating(got: Value, wanted: Value | None, pieces: Sequence[Record]) -> tuple[Value, tuple[int, ...]]:
    """The value as the ranks have it whose copy is not what is expected, laid over that of the others."""
    truth = wanted if wanted is not None and (wanted.dtype, wanted.shape) == (got.dtype, got.shape) else got
    bits, correct = as_bits(got).copy(), as_bits(truth)
    ranks = set()
    for piece in pieces:
        if (piece.dtype, piece.shape) == (got.dtype, got.shape):
            at, own = elements_of(piece), as_bits(piece)
            differs = own != correct[at]
            bits[at[differs]] = own[differs]
            ranks |= {piece.rank} if differs.any() else set()
    return got._replace(data=bits.tobytes()), tuple(sorted(ranks))


def _holders(shape: tuple[int, ...], pieces: Sequence[Record]) -> tuple[Holder, ...]:
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...], bool], set[int]] = {}
    for piece in pieces:
        if piece.shape == shape and piece.data:
            boxes.setdefault((piece.start, piece.size, piece.flat), set()).add(piece.rank)
    found = sorted(boxes.items(), key=lambda item: (min(item[1]), item[0]))
    return tuple(Holder(tuple(sorted(ranks)), *box) for box, ranks in found[:HOLDERS])


# --- the form -----------------------------------------------------------------------------------------


def _packed(elements: Elements) -> bytes:
    body = bytearray()
    items = [_plain(picture, body) for picture in elements.pictures]
    head = json.dumps({"left_out": elements.left_out, "pictures": items}, separators=(",", ":")).encode()
    return zlib.compress(head + b"\n" + bytes(body), 9)


def _plain(picture: Picture, body: bytearray) -> dict[str, Any]:
    def side(one: Side | None) -> dict[str, Any] | None:
        if one is None:
            return None
        body.extend(one.data)
        placed = {"at": len(body) - len(one.data), "length": len(one.data)}
        return {"dtype": one.dtype, "shape": one.shape, **placed, "holes": one.holes}

    return {
        **picture.key._asdict(), "first": picture.first, "expected": side(picture.expected),
        "observed": side(picture.observed), "copies": picture.copies,
        "owners": [{"ranks": h.ranks, "start": h.start, "size": h.size, "flat": h.flat} for h in picture.owners],
    }  # fmt: skip


def _read(item: Mapping[str, Any], body: bytes) -> Picture:
    def side(one: Mapping[str, Any] | None) -> Side | None:
        if one is None:
            return None
        holes = tuple((int(start), int(n)) for start, n in one["holes"])
        return Side(one["dtype"], tuple(one["shape"]), body[one["at"] : one["at"] + one["length"]], holes)

    owners = tuple(
        Holder(tuple(h["ranks"]), tuple(h["start"]), tuple(h["size"]), bool(h["flat"])) for h in item["owners"]
    )
    key = Key(item["op"], item["where"], item["role"], item["fqn"])
    return Picture(
        key, item["first"], side(item["expected"]), side(item["observed"]), owners, tuple(item["copies"])
    )  # fmt: skip
