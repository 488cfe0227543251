"""The right values of a tensor in the wrong places: permuted chunks, a transposition, a shift.

For example, twelve shards that were joined in the order of their names as text put 10 and 11 before 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from harness.diagnosis.arrangement import exchanged_dims, moved_along, order_name, slice_order
from harness.diagnosis.explanation import Context, Finding, Rule, tensor
from harness.diagnosis.rules.pieces import exchanged_in_parts, other_offset
from harness.diff import Difference
from harness.observe.assemble import Bits, as_bits
from harness.observe.logical import Key, Value

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
        order = slice_order(np.moveaxis(wanted, dim, 0), np.moveaxis(got, dim, 0))
        if order is None:
            continue
        pattern = order_name(order, _counts(context, key.op))
        clause = f"{tensor(key)} has its slices along dim {dim} in the order {_shorten(order)} after "
        clause += context.op_name(key.op) + (f": {pattern}" if pattern else "")
        evidence = {"name": key.fqn, "dim": dim, "order": list(order), "pattern": pattern}
        return Finding("certain" if pattern or len(order) > 2 else "likely", clause, evidence)
    return None


def _counts(context: Context, index: int) -> set[int]:
    """Numbers of chunks that the meshes of a scenario, and 2, give a dim."""
    op = context.op(index)
    meshes = {context.scenario.mesh, *([op.mesh] if op else [])}
    return {n for mesh in meshes for n in (mesh.dp_shard, mesh.tp, mesh.dp)} | {2}


def _shorten(order: Sequence[int]) -> str:
    shown = ", ".join(map(str, order[:16]))
    return f"[{shown}{', …' if len(order) > 16 else ''}]"


def misplaced(difference: Difference, context: Context) -> Finding | None:
    """Slices along dim 0 come from elsewhere in the tensor, some twice, some not at all (PT-136228, MLM-4423); or each
    rank has a stretch of it from a wrong place."""
    return _slices_misplaced(difference, context) or _stretches_misplaced(difference, context)


def _slices_misplaced(difference: Difference, context: Context) -> Finding | None:
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


def _stretches_misplaced(difference: Difference, context: Context) -> Finding | None:
    """Every rank that deviates has one stretch of its part from elsewhere in the tensor, whatever its rows."""
    key, moved = difference.key, other_offset(difference, context)
    if moved is None:
        return None
    told = "; ".join(
        f"rank {rank} has elements {first} to {last} from {source} on"
        for rank, (first, last, source) in sorted(moved.items())
    )
    clause = f"of {tensor(key)} after {context.op_name(key.op)}, flattened, {told}"
    return Finding("certain", clause, {"name": key.fqn, "ranks": {str(rank): list(m) for rank, m in moved.items()}})


def transposed(difference: Difference, context: Context) -> Finding | None:
    """The data are those of the transposed tensor under the original shape, as a whole or in each rank's part of it
    (AM-1691, CAI-5819)."""
    pair, key = context.pair(difference), difference.key
    if pair is None or len(pair.expected.shape) < 2:
        return None
    wanted, where = as_bits(pair.expected).reshape(pair.expected.shape), ""
    dims = exchanged_dims(wanted, as_bits(pair.observed).reshape(wanted.shape))
    if dims is None:
        dims, where = exchanged_in_parts(difference, context), " in each rank's part"
    if dims is None:
        return None
    clause = f"{tensor(key)} has dims {dims[0]} and {dims[1]} exchanged{where} after {context.op_name(key.op)}"
    return Finding(pair.strength, clause, {"name": key.fqn, "dims": list(dims)})


def shifted(difference: Difference, context: Context) -> Finding | None:
    """From some element on, everything is a few elements too early or too late (DS-1380, DS-8158: padding)."""
    pair, key = context.pair(difference), difference.key
    if pair is None:
        return None
    wanted, got = as_bits(pair.expected), as_bits(pair.observed)
    first = int(pair.at[0])
    by = moved_along(wanted, got, first)
    if by is None:
        return None
    how = f"{abs(by)} elements too {'early' if by > 0 else 'late'}"
    clause = f"{tensor(key)} is {how} from element {first} on after {context.op_name(key.op)}"
    return Finding("certain", clause, {"name": key.fqn, "from": first, "elements": by})


def padding_counted(difference: Difference, context: Context) -> Finding | None:
    """As many elements at the beginning of several tensors deviate as there is padding behind the one before each, and
    no other of the role does: a buffer was walked as if the padding were not there (DS-8158)."""
    pair, key = context.pair(difference), difference.key
    padding = _padding_before(key, context)
    if pair is None or key.fqn not in padding:
        return None
    of_role = [other for other in context.expected if other[:3] == key[:3]]
    deviating = {o.fqn for o in of_role if context.observed.get(o) != context.expected[o]}
    everywhere = all(
        fqn in padding and _is_beginning(key._replace(fqn=fqn), padding[fqn], context) for fqn in deviating
    )
    if len(deviating) < 2 or not everywhere:
        return None  # one may be chance
    clause = f"the first {len(pair.at)} of {difference.total} elements of {tensor(key)} deviate after "
    clause += f"{context.op_name(key.op)}, where {padding[key.fqn]} elements of padding precede them"
    evidence = {"name": key.fqn, "elements": len(pair.at), "padding": padding[key.fqn]}
    return Finding("likely", clause, evidence)


def _padding_before(key: Key, context: Context) -> dict[str, int]:
    """Parameter → the elements of padding behind the one before it, where rows are shared out evenly by padding."""
    op = context.op(key.op)
    if op is None or op.mesh.tp > 1:
        return {}
    found = {}
    for before, param in pairwise(context.model.unique_params):
        rows = before.spec.shape[0]
        padding = -rows % op.mesh.dp_shard * (before.spec.numel // rows)
        if padding:
            found[param.fqn] = padding
    return found


def _is_beginning(key: Key, padding: int, context: Context) -> bool:
    """Whether the elements that deviate are the first ones of a value, as many as padding precedes it."""
    expected, observed = context.expected.get(key), context.observed.get(key)
    if expected is None or observed is None or (expected.dtype, expected.shape) != (observed.dtype, observed.shape):
        return False
    at = np.flatnonzero(as_bits(expected) != as_bits(observed))
    return bool(np.array_equal(at, np.arange(min(padding, len(as_bits(expected))))))


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
    Rule("padding_counted", "Padding was taken for elements of the next tensor", padding_counted, ("DS-8158",)),
    Rule(
        "from_neighbours",
        "Parts of one tensor are stored under another one's name",
        from_neighbours,
        ("MLM-5077", "DS-8158"),
    ),
)
