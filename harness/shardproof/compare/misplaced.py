"""Finds tensors whose bits are right but in the wrong place: under another name, in another row, shifted by a few
elements, or under another shape or dtype.

These need more than one look at a tensor, so they are tried only on what differs. Which tensor holds another one's bits
is found by a sample of each (`SAMPLE` elements at `SAMPLES` places), and believed only after all of both was read.
Orders of slices are looked for only where both sides have the same elements in sum: along every dim in tensors of up to
`WHOLE_BYTES`, along dim 0 in larger ones, whose rows are told by digests of 128 bits.

*Verifies*: an explanation holds for every element of the tensors that it names, but for those that it says it does not
hold for. *Does not verify*: that it is the only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from shardproof.compare.bits import PIECE_BYTES, same
from shardproof.compare.contents import Reading, Tensor
from shardproof.compare.dtypes import is_float, itemsize, numbers, numpy_of, raw_of
from shardproof.diagnosis.arrangement import exchanged_dims, moved_along, order_name, slice_order

WHOLE_BYTES = 32 << 20
"""The largest tensor that is taken into memory as a whole, to look for an order."""

MOST_SLICES = 1 << 16
"""Along dims of more slices, orders are not looked for."""

SAMPLES, SAMPLE = 8, 16
DISTINCT = 3
MOST_SAMPLED = 20_000
"""With more tensors than this that could hold another one's bits, none is looked for."""

_NAMED_ORDERS = 256
_MOSTLY = 4
"""A tensor that has moved along keeps at least so many times the elements that it has moved by."""
_BLOCKS = 6

Raw = npt.NDArray[Any]
Explained = tuple[str, str]
"""A mechanism's name, and a sentence; both empty where nothing was found."""

NOTHING: Explained = ("", "")
ANOTHER_ORDER = "B has A's slices along dim {} in another order: {}."


def rearranged(a: Tensor, b: Tensor, first: int, *, same_multiset: bool) -> Explained:
    """How the elements of one side lie in the other, of the same dtype and shape.

    Args:
        first: the first flat element that differs. same_multiset: whether the same elements may be there.
    """
    if raw_of(a.dtype).kind != "u":
        return NOTHING
    if a.nbytes > WHOLE_BYTES:
        order = row_order(a, b) if same_multiset else None
        return ("permuted", ANOTHER_ORDER.format(0, _order(order))) if order else NOTHING
    mine, its = read_all(a), read_all(b)
    if same_multiset:
        found = _in_another_order(mine.reshape(a.shape), its.reshape(a.shape))
        if found[0]:
            return found
    by = moved_along(mine, its, first)
    if by is None or abs(by) * _MOSTLY > a.numel - first:
        return NOTHING
    if by > 0:
        text = f"From element {first} on, B has A's elements {by} place{_s(by)} earlier, but for its last {by}."
    else:
        text = (
            f"From element {first - by} on, B has A's elements {-by} place{_s(by)} later; the {-by} before are others."
        )
    return "shifted", text


def _in_another_order(mine: Raw, its: Raw) -> Explained:
    for dim, slices in enumerate(mine.shape):
        if 1 < slices <= MOST_SLICES:
            order = slice_order(np.moveaxis(mine, dim, 0), np.moveaxis(its, dim, 0))
            if order is not None:
                return "permuted", ANOTHER_ORDER.format(dim, _order(order))
    dims = exchanged_dims(mine, its)
    if dims is not None:
        return "transposed", f"B has A's elements with dims {dims[0]} and {dims[1]} exchanged."
    return NOTHING


def _order(order: Sequence[int]) -> str:
    """An order of slices in words: its blocks where they are few, else its name or its beginning."""
    starts = [0, *(i for i in range(1, len(order)) if order[i] != order[i - 1] + 1)]
    if len(starts) <= _BLOCKS:
        ends = [*starts[1:], len(order)]
        blocks = [(order[begin], order[begin] + end - begin - 1) for begin, end in zip(starts, ends, strict=True)]
        return ", then ".join(f"{low} to {high}" if high > low else str(low) for low, high in blocks)
    name = order_name(order, {2, 4, 8}) if len(order) <= _NAMED_ORDERS else ""
    return name or f"{', '.join(map(str, order[:8]))}, …"


def row_order(a: Tensor, b: Tensor) -> tuple[int, ...] | None:
    """Which row (along dim 0) of A each row of B is, if that is a permutation of distinct rows; tensors of any size."""
    if not a.shape or not 1 < a.shape[0] <= MOST_SLICES or a.nbytes // a.shape[0] > PIECE_BYTES:
        return None
    places = {digest: row for row, digest in enumerate(_row_digests(a))}
    if len(places) != a.shape[0]:
        return None
    order = tuple(places.get(digest, -1) for digest in _row_digests(b))
    return order if sorted(order) == list(range(len(order))) else None


def _row_digests(tensor: Tensor) -> Iterator[bytes]:
    rows, length = tensor.shape[0], tensor.numel // tensor.shape[0]
    step = max(1, PIECE_BYTES // (length * itemsize(tensor.dtype)))
    reading, raw = Reading(tensor), np.empty((step, length), raw_of(tensor.dtype))
    for first in range(0, rows, step):
        some = raw[: min(step, rows - first)]
        reading.read(first * length, some.reshape(-1))
        for row in some:
            yield blake2b(row.data, digest_size=16).digest()


def other_shape(a: Tensor, b: Tensor) -> Explained:
    """How two tensors of one dtype and of different shapes belong together."""
    if a.numel == b.numel and a.numel:
        if equal_elements(a, b):
            return "reshaped", "Both have the same elements in the same order, under another shape."
        turned = len(a.shape) == 2 and a.shape == b.shape[::-1] and a.nbytes <= WHOLE_BYTES
        if turned and np.array_equal(read_all(a).reshape(a.shape).T, read_all(b).reshape(b.shape)):
            return "transposed", "B is A transposed."
        return NOTHING
    if len(a.shape) != len(b.shape) or not a.shape or a.shape[1:] != b.shape[1:] or not min(a.numel, b.numel):
        return NOTHING
    longer, shorter = (("A", a), ("B", b)) if a.numel > b.numel else (("B", b), ("A", a))
    rows = longer[1].shape[0] - shorter[1].shape[0]
    if not equal_elements(a, b, shorter[1].numel):
        return NOTHING
    zero = _zero_from(longer[1], shorter[1].numel)
    what = "and they are zero" if zero else "with values of their own"
    return "padded", f"{longer[0]} begins with all of {shorter[0]} and has {rows} more along dim 0, {what}."


def other_dtype(a: Tensor, b: Tensor) -> Explained:
    """Whether two tensors of one shape and of different dtypes are one, cast."""
    if not (is_float(a.dtype) and is_float(b.dtype)) or not a.numel:
        return NOTHING
    ways = {"equal": True, "b": True, "a": True}
    step = max(1, PIECE_BYTES // 8)
    one, other = Reading(a), Reading(b)
    for first in range(0, a.numel, step):
        count = min(step, a.numel - first)
        x, y = _part(one, a, first, count), _part(other, b, first, count)
        with np.errstate(all="ignore"):
            ways["b"] &= same(x.astype(numpy_of(b.dtype)).view(raw_of(b.dtype)), y.view(raw_of(b.dtype)))
            ways["a"] &= same(y.astype(numpy_of(a.dtype)).view(raw_of(a.dtype)), x.view(raw_of(a.dtype)))
        ways["equal"] = ways["a"] and ways["b"]
        if not any(ways.values()):
            return NOTHING
    one.finish()
    other.finish()
    if ways["equal"]:
        return "cast", f"The numbers are equal: {b.dtype} holds each of A's exactly."
    if ways["b"]:
        return "cast", f"B is A rounded to {b.dtype}."
    return "cast", f"A is B rounded to {a.dtype}."


def _part(reading: Reading, tensor: Tensor, first: int, count: int) -> Raw:
    raw = np.empty(count, raw_of(tensor.dtype))
    reading.read(first, raw)
    return numbers(raw, tensor.dtype)


def equal_elements(a: Tensor, b: Tensor, count: int | None = None) -> bool:
    """Whether the first `count` elements (all, of as many, without it) of two tensors of one dtype have the same bits,
    row-major."""
    total = a.numel if count is None else count
    step = max(1, PIECE_BYTES // itemsize(a.dtype))
    one, other = Reading(a), Reading(b)
    pair = np.empty((2, min(step, total)), raw_of(a.dtype))
    for first in range(0, total, step):
        length = min(step, total - first)
        one.read(first, pair[0, :length])
        other.read(first, pair[1, :length])
        if not same(pair[0, :length], pair[1, :length]):
            return False
    return True


def _zero_from(tensor: Tensor, first: int) -> bool:
    step = max(1, PIECE_BYTES // itemsize(tensor.dtype))
    reading = Reading(tensor)
    for begin in range(first, tensor.numel, step):
        raw = np.empty(min(step, tensor.numel - begin), raw_of(tensor.dtype))
        reading.read(begin, raw)
        if raw.view(np.uint8).any():
            return False
    return True


def holders(
    wanted: Mapping[str, Tensor], held: Mapping[str, Tensor], differing: Iterable[str], budget_bytes: int
) -> dict[str, str]:
    """Name of a tensor of B → the name under which A has its bits, for those that A does not have under that name.

    Args:
        wanted: A's tensors that may be the source. held: B's tensors. differing: the names of B to explain.
        budget_bytes: how much may be read to make sure.
    """
    names = list(differing)
    if not names or len(wanted) + len(names) > MOST_SAMPLED:
        return {}
    classes = {_class(held[name]) for name in names}
    sources: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in wanted.items():
        key = _sample(tensor) if _class(tensor) in classes else None
        if key is not None:
            sources.setdefault(key, []).append(name)
    found: dict[str, str] = {}
    for name in names:
        key = _sample(held[name])
        for source in sources.get(key, ()) if key else ():
            budget_bytes -= 2 * held[name].nbytes
            if source != name and budget_bytes >= 0 and equal_elements(wanted[source], held[name]):
                found[name] = source
                break
    return found


def _class(tensor: Tensor) -> tuple[str, int]:
    return tensor.dtype, tensor.numel


def _sample(tensor: Tensor) -> tuple[Any, ...] | None:
    """A few bits sampled along a tensor, equal for two tensors that probably have equal content. None for a nearly
    constant tensor, such as zeros, whose sample would match too much."""
    if not tensor.numel:
        return None
    reading, length = Reading(tensor), min(SAMPLE, tensor.numel)
    places = sorted({(tensor.numel - length) * i // (SAMPLES - 1) for i in range(SAMPLES)})
    raw = np.empty((len(places), length), raw_of(tensor.dtype))
    for row, first in zip(raw, places, strict=True):
        reading.read(first, row)
    bits = raw.tobytes()
    size = itemsize(tensor.dtype)
    different = {bits[i : i + size] for i in range(0, len(bits), size)}
    return (*_class(tensor), bits) if len(different) >= min(DISTINCT, tensor.numel) else None


def explain_holders(found: Mapping[str, str]) -> dict[str, Explained]:
    """The sentence about each tensor that holds another one's bits."""
    explained = {}
    for name, source in found.items():
        if found.get(source) == name:
            explained[name] = ("swapped", f"A's {name} and {source} are exchanged in B.")
        else:
            explained[name] = ("other_tensor", f"B has here what A has under {source}.")
    return explained


def read_all(tensor: Tensor) -> Raw:
    """All elements of a tensor, flat, as unsigned integers of their size."""
    raw = np.empty(tensor.numel, raw_of(tensor.dtype))
    Reading(tensor).read(0, raw)
    return raw


def _s(count: int) -> str:
    return "" if abs(count) == 1 else "s"
