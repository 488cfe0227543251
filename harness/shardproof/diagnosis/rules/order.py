"""Rules for tensors that hold the right values in the wrong order: permuted chunks, a transposition, or a shift.

For example, twelve shards that were joined in the order of their names as text put 10 and 11 before 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from shardproof.diagnosis.arrangement import DISTINCT, distinct, exchanged_dims, moved_along, order_name, slice_order
from shardproof.diagnosis.explanation import Confidence, Context, Finding, Pair, Rule, tensor
from shardproof.diagnosis.rules.pieces import exchanged_in_parts, other_offset, position
from shardproof.diff import Difference, as_numbers
from shardproof.observe.assemble import Bits, as_bits, elements_of
from shardproof.observe.logical import Key, Value
from shardproof.scenario import Mesh

WINDOW, WINDOWS = 6, 8
"""How many elements in a row are no chance, and at how many places of a tensor they are looked for."""

LARGEST = 1 << 16
"""Bytes of a tensor in which windows are looked for."""


def permuted(difference: Difference, context: Context) -> Finding | None:
    """The slices along one dim are all there, in another order (PT-130760 strided, DS-5342 10 before 9)."""
    return context.once(("permuted", difference.key), partial(_permuted, difference, context))


def _permuted(difference: Difference, context: Context) -> Finding | None:
    pair, key = context.pair(difference), difference.key
    if pair is None:
        return None
    shape = pair.expected.shape
    wanted, got = as_bits(pair.expected).reshape(shape), as_bits(pair.observed).reshape(shape)
    if not np.array_equal(np.sort(wanted, axis=None), np.sort(got, axis=None)):
        return None  # something is not there at all
    for dim in range(len(shape)):
        order = slice_order(np.moveaxis(wanted, dim, 0), np.moveaxis(got, dim, 0))
        if order is None:
            continue
        pattern = order_name(order, _counts(context, key.op))
        clause = f"{tensor(key)} has its slices along dim {dim} in the order {_shorten(order)} after "
        clause += context.op_name(key.op) + (f": {pattern}" if pattern else "")
        evidence = {"name": key.fqn, "dim": dim, "order": list(order), "pattern": pattern}
        return Finding("certain", clause, evidence)
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
    return (
        _slices_misplaced(difference, context)
        or _stretches_misplaced(difference, context)
        or _runs_misplaced(difference, context)
    )


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


def _runs_misplaced(difference: Difference, context: Context) -> Finding | None:
    """All that deviates is several stretches from elsewhere in the tensor, with zeros between them: shares were put
    together by offsets that do not fit their sizes (MLM-2769: a share of a fused weight is cut in halves)."""
    pair, key = context.pair(difference), difference.key
    if pair is None or not pair.is_float or permuted(difference, context) is not None:
        return None
    runs = _runs(pair, as_bits(pair.expected), as_bits(pair.observed))
    if len({source - at for at, source, _ in runs}) < 2:
        return None  # one stretch that moved as a whole is another rule's
    told = "; ".join(f"{length} from {at} on are those from {source} on" for at, source, length in runs[:4])
    clause = f"of {tensor(key)} after {context.op_name(key.op)}, in elements, {told}{'; …' if len(runs) > 4 else ''}"
    return Finding("certain", clause, {"name": key.fqn, "runs": [list(run) for run in runs]})


def _runs(pair: Pair, wanted: Bits, got: Bits) -> list[tuple[int, int, int]]:
    """`(place, source, length)` of the stretches of which all that deviates and is not zero consists; empty if some of
    it is of no stretch."""
    found: list[tuple[int, int, int]] = []
    end = 0
    for at in pair.at.tolist():
        if at < end or not got[at]:
            continue
        source = position(got[at : at + DISTINCT], pair.expected)
        length = 0 if source is None else _common(got[at:], wanted[source:])
        if source is None or distinct(got[at : at + length]) < DISTINCT:
            return []
        end = at + length
        found.append((at, source, length))
    return found


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
    """As many elements at the beginning of every tensor deviate as there is padding behind the one before it, and
    nothing else of the role does: a buffer was walked as if the padding were not there (DS-8158).

    Padding that is longer than the tensor behind it says little, so that one must deviate in a part.
    """
    key = difference.key
    if difference.kind not in ("bits", "replica_conflict"):
        return None
    padding = _padding_before(key, context)
    if not all(_is_beginning(key._replace(fqn=fqn), own, context) for fqn, own in padding.items()):
        return None
    behind = {fqn: max(own.values()) for fqn, own in padding.items() if any(own.values())}
    partly = any(n < prod(context.expected[key._replace(fqn=fqn)].shape) for fqn, n in behind.items())
    elements = behind.get(key.fqn, 0)
    if not partly or not elements or (len(behind) == 1 and elements == 1):
        return None  # one element may be chance
    clause = f"{tensor(key)} deviates after {context.op_name(key.op)} in its first elements on every rank, "
    clause += f"as many as there is padding before it, {elements}"
    confidence: Confidence = "likely" if len(behind) > 1 else "possible"
    return Finding(confidence, clause, {"name": key.fqn, "padding": elements})


def _padding_before(key: Key, context: Context) -> dict[str, dict[int, int]]:
    """Parameter → rank → the elements of padding behind the parameter before it, where rows are shared out evenly by
    padding; of what each rank has gathered for its forwards. A parameter that no forward uses lies between all the
    same: it is as large as its model says, where tensor parallelism leaves it whole."""
    op = context.op(key.op)
    if op is None or key.role != "compute_param":
        return {}
    found: dict[str, dict[int, int]] = {}
    before: dict[int, int] = {}
    for param in context.model.unique_params:
        gathered = context.pieces(key._replace(fqn=param.fqn))
        if gathered:
            found[param.fqn] = {piece.rank: before.get(piece.rank, 0) for piece in gathered}
            before = {piece.rank: 0 if piece.flat else _padding(piece.size, op.mesh) for piece in gathered}
        elif not param.spec.used and (op.mesh.tp == 1 or param.spec.tp_dim is None):
            before = dict.fromkeys(range(op.mesh.world), _padding(param.spec.shape, op.mesh))
    return found


def _padding(size: Sequence[int], mesh: Mesh) -> int:
    """The elements of padding behind what a rank has gathered of a parameter: a box of this size."""
    if not prod(size):
        return 0
    rows = size[0] if size else 1
    return -rows % mesh.dp_shard * (prod(size) // rows)


def _is_beginning(key: Key, padding: Mapping[int, int], context: Context) -> bool:
    """Whether the elements that deviate on each rank are the first ones, as many as padding precedes them; infinities,
    to which anything may be added, count as they are."""
    expected = context.expected.get(key)
    if expected is None:
        return False
    for piece in context.pieces(key):
        if piece.dtype != expected.dtype or piece.shape != expected.shape:
            return False
        due, own = as_numbers(expected)[elements_of(piece)], as_numbers(Value(piece.dtype, piece.shape, piece.data))
        first = np.arange(len(own)) < padding[piece.rank]
        if not np.array_equal(np.flatnonzero(due != own), np.flatnonzero(first & np.isfinite(due.astype(np.float64)))):
            return False
    return True


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
        if len(window) < WINDOW or distinct(window) < 3:
            continue
        for other, value in context.siblings(key):
            at = position(window, value) if value.dtype == pair.observed.dtype else None
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
