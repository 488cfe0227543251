"""The right values of a tensor in the wrong places: permuted chunks, a transposition, a shift.

For example, twelve shards that were joined in the order of their names as text put 10 and 11 before 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from harness.diagnosis.explanation import Context, Finding, Rule, tensor
from harness.diff import Difference
from harness.observe.assemble import Bits, as_bits
from harness.observe.logical import Value
from harness.scenario import Mesh

WINDOW, WINDOWS = 6, 8
"""How many elements in a row are no chance, and at how many places of a tensor they are looked for."""

LARGEST = 1 << 16
"""Bytes of a tensor in which windows are looked for."""


def permuted(difference: Difference, context: Context) -> Finding | None:
    """The slices along one dim are all there, in another order (PT-130760 strided, DS-5342 10 before 9)."""
    pair, key = context.pair(difference), difference.key
    if pair is None:
        return None
    shape = pair.expected.shape
    wanted, got = as_bits(pair.expected).reshape(shape), as_bits(pair.observed).reshape(shape)
    for dim in range(len(shape)):
        order = _permutation(np.moveaxis(wanted, dim, 0), np.moveaxis(got, dim, 0))
        if order is None:
            continue
        pattern = _pattern(order, context, key.op)
        clause = f"{tensor(key)} has its slices along dim {dim} in the order {_shorten(order)} after "
        clause += context.op_name(key.op) + (f": {pattern}" if pattern else "")
        evidence = {"name": key.fqn, "dim": dim, "order": list(order), "pattern": pattern}
        return Finding("certain" if pattern or len(order) > 2 else "likely", clause, evidence)
    return None


def _permutation(wanted: Bits, got: Bits) -> tuple[int, ...] | None:
    """Which expected slice each observed slice is, if that is a permutation of distinct slices."""
    places = {part.tobytes(): index for index, part in enumerate(wanted)}
    if len(places) != len(wanted):
        return None
    order = [places.get(part.tobytes(), -1) for part in got]
    return tuple(order) if sorted(order) == list(range(len(wanted))) else None


def _pattern(order: Sequence[int], context: Context, index: int) -> str:
    """A name for a permutation of slices, if it is one of the usual mistakes."""
    op = context.op(index)
    meshes = {context.scenario.mesh, *([op.mesh] if op else [])}
    for name, chunks in _patterns(len(order), meshes):
        if [i for start, end in chunks for i in range(start, end)] == list(order):
            return name
    return ""


def _patterns(size: int, meshes: set[Mesh]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Usual wrong orders of the chunks of a dim, as `(start, end)` in the order observed."""
    for parts in range(2, size + 1):
        bounds = _bounds(size, parts)
        if parts > 10:
            yield f"the {parts} chunks sorted as text", [bounds[i] for i in sorted(range(len(bounds)), key=str)]
        yield f"the {parts} chunks in reverse", bounds[::-1]
    counts = {n for mesh in meshes for n in (mesh.dp_shard, mesh.tp, mesh.dp)} | {2}
    for outer in sorted(counts):
        for inner in sorted(counts):
            bounds = _bounds(size, outer * inner)
            if len(bounds) == outer * inner and outer > 1 and inner > 1:
                exchanged = [bounds[i * inner + j] for j in range(inner) for i in range(outer)]
                yield f"{outer} × {inner} chunks with the two levels of sharding exchanged", exchanged


def _bounds(size: int, parts: int) -> list[tuple[int, int]]:
    step = -(-size // parts)
    edges = [min(step * i, size) for i in range(parts + 1)]
    return [(start, end) for start, end in pairwise(edges) if end > start]


def _shorten(order: Sequence[int]) -> str:
    shown = ", ".join(map(str, order[:16]))
    return f"[{shown}{', …' if len(order) > 16 else ''}]"


def misplaced(difference: Difference, context: Context) -> Finding | None:
    """Slices along dim 0 come from elsewhere in the tensor, some twice, some not at all (PT-136228, MLM-4423)."""
    pair, key = context.pair(difference), difference.key
    if pair is None or not pair.expected.shape or permuted(difference, context) is not None:
        return None
    shape = pair.expected.shape
    wanted, got = (as_bits(value).reshape(shape[0], -1) for value in (pair.expected, pair.observed))
    places = {part.tobytes(): index for index, part in enumerate(wanted)}
    moved = {int(row): places.get(got[row].tobytes(), -1) for row in np.flatnonzero((wanted != got).any(axis=1))}
    empty = [row for row, source in moved.items() if source < 0 and not got[row].any()]
    found = [source for source in moved.values() if source >= 0]
    if len(places) != len(wanted) or not found or len(found) + len(empty) != len(moved):
        return None
    pairs = ", ".join(f"{row} holds {'zeros' if row in empty else moved[row]}" for row in list(moved)[:6])
    clause = f"in {tensor(key)} after {context.op_name(key.op)}, slice {pairs}{', …' if len(moved) > 6 else ''}"
    evidence = {"name": key.fqn, "slices": list(moved), "sources": list(moved.values())}
    return Finding("certain" if len(set(found)) >= 3 else "likely", clause, evidence)


def transposed(difference: Difference, context: Context) -> Finding | None:
    """The data are those of the transposed tensor under the original shape (AM-1691, CAI-5819)."""
    pair, key = context.pair(difference), difference.key
    if pair is None or len(pair.expected.shape) < 2:
        return None
    wanted = as_bits(pair.expected).reshape(pair.expected.shape)
    for first, second in pairwise(range(wanted.ndim)):
        if np.swapaxes(wanted, first, second).tobytes() == pair.observed.data:
            clause = f"{tensor(key)} has dims {first} and {second} exchanged after {context.op_name(key.op)}"
            return Finding(pair.strength, clause, {"name": key.fqn, "dims": [first, second]})
    return None


def shifted(difference: Difference, context: Context) -> Finding | None:
    """From some element on, everything is a few elements too early or too late (DS-1380, DS-8158: padding)."""
    pair, key = context.pair(difference), difference.key
    if pair is None:
        return None
    wanted, got = as_bits(pair.expected), as_bits(pair.observed)
    first = int(pair.at[0])
    for by in (offset for n in range(1, min(17, len(got) - first)) for offset in (n, -n)):
        source, target = _overlap(wanted, got, first, by)
        if len(target) >= 3 and len(np.unique(target)) >= 3 and (source == target).all():
            how = f"{abs(by)} elements too {'early' if by > 0 else 'late'}"
            clause = f"{tensor(key)} is {how} from element {first} on after {context.op_name(key.op)}"
            return Finding("certain", clause, {"name": key.fqn, "from": first, "elements": by})
    return None


def _overlap(
    wanted: npt.NDArray[np.generic], got: npt.NDArray[np.generic], first: int, by: int
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
    """Expected and observed elements that face each other if everything from `first` on moved forward by `by`."""
    if by > 0:
        return wanted[first + by :], got[first : len(got) - by]
    return wanted[first : len(wanted) + by], got[first - by :]


def from_neighbours(difference: Difference, context: Context) -> Finding | None:
    """A stretch of a tensor holds a stretch of another one: both were cut out of one flat buffer (MLM-5077: padding).

    Only what is written is looked at, since there the cut is made. A window of what deviates is looked for in every
    other tensor of the role.
    """
    pair, key = context.pair(difference), difference.key
    if pair is None or key.where != "written" or len(pair.observed.data) > LARGEST:
        return None
    got = as_bits(pair.observed)
    for start in pair.at[:: max(1, len(pair.at) // WINDOWS)]:
        window = got[start : start + WINDOW]
        if len(window) < WINDOW or len(np.unique(window)) < 3:
            continue
        for other, value in context.siblings(key):
            at = _found(window, value) if value.dtype == pair.observed.dtype else None
            if at is None or at == start:  # at its own place: sources.other_parameter says so of the whole tensor
                continue
            source = as_bits(value)
            before = _common(got[:start][::-1], source[:at][::-1])
            length = before + _common(got[start:], source[at:])
            source_of = f"those of {other.fqn} from element {at - before} on, after {context.op_name(key.op)}"
            clause = f"{length} of {len(got)} elements of {tensor(key)} are {source_of}"
            evidence = {"name": key.fqn, "from": other.fqn, "at": at - before, "elements": length}
            return Finding("certain", clause, evidence)
    return None


def _found(window: Bits, value: Value) -> int | None:
    """Where the window begins in a value; None if nowhere, or if it lies across elements."""
    at = value.data.find(window.tobytes())
    return at // window.itemsize if at >= 0 and at % window.itemsize == 0 else None


def _common(one: Bits, other: Bits) -> int:
    """For how many elements two stretches agree from their beginnings on."""
    length = min(len(one), len(other))
    unequal = np.flatnonzero(one[:length] != other[:length])
    return int(unequal[0]) if len(unequal) else length


RULES = (
    Rule(
        "permuted",
        "The parts of a tensor are in the wrong order",
        permuted,
        ("PT-130760", "DS-5342", "DS-5395", "MLM-ROCM63", "MLM-2769"),
    ),
    Rule(
        "misplaced",
        "Parts of a tensor come from a wrong offset of the same tensor",
        misplaced,
        ("PT-136228", "PT-130760", "MLM-4423", "MLM-2769", "PT-110762", "DS-7601"),
    ),
    Rule("transposed", "A tensor's dims are exchanged", transposed, ("AM-1691", "CAI-5819")),
    Rule(
        "shifted",
        "A tensor is read or written at a wrong offset",
        shifted,
        ("DS-1380", "DS-8158", "MLM-5898", "MLM-2576"),
    ),
    Rule(
        "from_neighbours",
        "Parts of one tensor are stored under another one's name",
        from_neighbours,
        ("MLM-5077", "DS-8158"),
    ),
)
