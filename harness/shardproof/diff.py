"""Compare an observation with what an oracle expects: structure first, then bits.

Structure is what there is: a value that is missing or too many, another dtype or shape, a gap or an overlap between the
pieces. Where the structure is wrong, bits are not compared. For example, `exp_avg dtype` means that a moment is stored
in bf16 where the contract says fp32; its values are not looked at.

*Verifies*: every expected value is there and no other; same dtype, same shape, same bytes. NaN payloads and the sign of
zero count. The global gradient norm alone is compared within a stated number of ULPs.
*Does not verify*: why a value differs (see `shardproof.diagnosis`).

A comparison of nothing is never a pass: without a single expected byte the result is a `missing` difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shardproof.layout import multi_index
from shardproof.observe.assemble import Bits, as_bits, elements_of, record_key
from shardproof.observe.logical import Key, Logical, Problem, Value
from shardproof.observe.record import NUMPY_NAME, Record, every_rank

STRUCTURE = ("unreadable", "missing", "extra", "dtype", "shape", "size", "gap", "overlap", "replica_conflict")

NOTHING = Key(-1, "live", "", "")
"""The key of the `missing` difference that a comparison without anything expected gives."""

RUNS = 64
"""How many runs of deviating elements a difference lists: a picture of the pattern, not a copy of the tensor."""

NORM_ULPS = {"fp32": 128, "fp16": 4 << 12, "bf16": 4 << 15}
"""How far a reported gradient norm may be from the exact one, in fp32 ULPs, by the narrowest gradient dtype.

fp32: summing n non-negative squares one after the other has a relative error of at most n·2^-24, which the
root halves; with n ≤ 200 elements a parameter that is 100 ULPs, and 28 more for the norm over at most 40
shard norms and the roots themselves. Half precision: libraries round each shard norm, each partial sum over
at most 8 ranks, and the result to the gradient's dtype; errors of half a unit each and of both signs: 4 units of
2^-9 for bf16 and of 2^-12 for fp16, counted in units of 2^-24, have not
been exceeded in a nightly. A norm without a parameter or a rank that holds more than 2 % of its square is off by more.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not as expected.

    * kind: one of `STRUCTURE`, or `bits`, `norm`, `direction`, `equivalent`.
    * ranks: those that hold deviating elements, where known.
    * mismatched, total: elements.
    * first_index, last_index: of the deviating elements, one entry a dim.
    * max_ulp: largest distance in units in the last place (for integers the absolute difference); None where it has no
      meaning (structure, text, only NaNs).
    * nan_mismatches: deviating elements that are NaN on either side: they have no distance.
    * ulp_histogram: `(distances, count)` by power of two.
    * expected_first, observed_first: the first deviating element, as number and bit pattern.
    * detail: one sentence, where there is more to say.
    * runs: `(start, length)` of the deviating elements in the flattened tensor, the first `RUNS` of them.
    """

    key: Key
    kind: str
    ranks: tuple[int, ...] = ()
    mismatched: int = 0
    total: int = 0
    first_index: tuple[int, ...] = ()
    last_index: tuple[int, ...] = ()
    max_ulp: int | None = None
    nan_mismatches: int = 0
    ulp_histogram: tuple[tuple[str, int], ...] = ()
    expected_digest: str = ""
    observed_digest: str = ""
    expected_first: str = ""
    observed_first: str = ""
    detail: str = ""
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def fails(self) -> bool:
        """False for what the contract allows: listed and counted, but no failure."""
        return self.kind != "equivalent"


@dataclass(frozen=True)
class Equivalence:
    """A contract's promise that a missing value and zeros mean the same, as long as the parameter's step is 0.

    roles: the roles it covers; `step` also where an optimizer counts in its param group, as FusedAdam does.
    source: where the promise is written.
    """

    roles: frozenset[str]
    source: str

    def covers(self, key: Key) -> bool:
        counts_in_group = key.role == "hyperparameter" and key.fqn.endswith(".step")
        return ("step" if counts_in_group else key.role) in self.roles


LAZY_STATE = Equivalence(
    frozenset({"exp_avg", "exp_avg_sq", "momentum", "step"}),
    "torch.optim creates a parameter's state at its first gradient, as zeros with step 0; "
    "torch.distributed.checkpoint.state_dict creates it before a load",
)


def diff(
    expected: Logical,
    observed: Logical,
    problems: Sequence[Problem] = (),
    equivalences: Sequence[Equivalence] = (),
    records: Iterable[Record] = (),
) -> list[Difference]:
    """All differences, by operation, structure before bits, equivalent ones last; empty if there are none.

    Args:
        expected: what the oracle predicts. observed, problems: the result of `assemble`.
        equivalences: the contract's normalisations.
        records: the pieces that `observed` was assembled from; read only after a failure, to say which
            ranks hold the deviating elements.
    """
    if not problems and expected == observed and any(value.data for value in expected.values()):
        return []  # bit for bit: values are compared as bytes, with their dtypes and shapes
    unsound = {problem.key for problem in problems}
    found = [_of_problem(problem, expected) for problem in problems]
    if not any(value.data for value in expected.values()):
        found.append(Difference(NOTHING, "missing", detail="nothing to compare: no expected value has any element"))
    for key, value in expected.items():
        other = observed.get(key)
        if other is None:
            if key not in unsound:
                found.append(_absent(key, "missing", value, expected))
        elif other.data != value.data or other.dtype != value.dtype or other.shape != value.shape:
            difference = _unequal(key, value, other, expected)
            if difference is not None:
                found.append(difference)
    if len(observed) != len(expected) or not observed.keys() <= expected.keys():
        for key in observed.keys() - expected.keys():
            found.append(_absent(key, "extra", observed[key], observed))
    if not found:
        return []
    found = [_normalised(d, expected, observed, equivalences) for d in found]
    return sorted(_with_ranks(found, expected, records), key=_order)


def _order(difference: Difference) -> tuple[bool, int, bool, str, str, str]:
    key = difference.key
    return (not difference.fails, key.op, difference.kind not in STRUCTURE, key.where, key.role, key.fqn)


def digest(value: Value) -> str:
    """Sixteen hex digits that identify a value: its dtype, shape and bytes."""
    return blake2b(repr((value.dtype, value.shape)).encode() + value.data, digest_size=8).hexdigest()


def as_numbers(value: Value) -> npt.NDArray[np.generic]:
    """The value's elements as a numpy array of its own dtype, shape (elements,)."""
    return np.frombuffer(value.data, numpy_dtype(value.dtype))


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype of a record's dtype name."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bf16" else NUMPY_NAME[name])


def _of_problem(problem: Problem, expected: Mapping[Key, Value]) -> Difference:
    value = expected.get(problem.key)
    return Difference(
        problem.key,
        problem.kind,
        problem.ranks,
        total=_elements(value) if value else 0,
        expected_digest=digest(value) if value else "",
        detail=problem.detail,
    )


def _absent(key: Key, kind: str, value: Value, held: Logical) -> Difference:
    """The difference where only one side has a value; `held` is that side's."""
    elements = _elements(value)
    of_it = digest(value)
    first = _show(value, 0) if elements else ""
    state = _state_of(key)
    kept, step = held.get(state, value), held.get(state._replace(role="step"))
    zero = not kept.data.strip(b"\0") and (step is None or not step.data.strip(b"\0"))
    if zero and state != key:
        zero = bool(np.isfinite(as_numbers(value)).all())
    if kind == "missing":
        found = Difference(key, kind, mismatched=elements, total=elements, expected_digest=of_it, expected_first=first)
    else:
        found = Difference(key, kind, mismatched=elements, total=elements, observed_digest=of_it, observed_first=first)
    return replace(found, detail=_ZERO_STATE) if zero else found


_ZERO_STATE = "all bits zero, at step 0"


def _state_of(key: Key) -> Key:
    """The state that a quantisation scale belongs to, which is zero whatever finite number the scale is; any other key
    itself."""
    if key.role != "quant_scale":
        return key
    name, _, role = key.fqn.rpartition(".")
    return key._replace(role=role, fqn=name)


def _normalised(
    difference: Difference, expected: Logical, observed: Logical, equivalences: Sequence[Equivalence]
) -> Difference:
    """The difference as `equivalent` if a contract says that absence and zeros mean the same."""
    if difference.kind not in ("missing", "extra") or difference.detail != _ZERO_STATE:
        return difference
    other_side = observed if difference.kind == "missing" else expected
    state = _state_of(difference.key)
    step = other_side.get(state._replace(role="step"))
    if step is not None and step.data.strip(b"\0"):
        return difference
    for promise in equivalences:
        if promise.covers(state):
            return replace(difference, kind="equivalent", detail=f"absent against zeros at step 0: {promise.source}")
    return difference


def _unequal(key: Key, value: Value, other: Value, expected: Logical) -> Difference | None:
    """The difference between two values of which bytes, dtype or shape are not the same; None for a norm within its
    bounds. A text is one value, however long it is."""
    if value.dtype == other.dtype == "utf8":
        return Difference(
            key, "bits", mismatched=1, total=1, expected_digest=digest(value), observed_digest=digest(other),
            expected_first=_show(value, 0), observed_first=_show(other, 0),
        )  # fmt: skip
    if other.dtype != value.dtype or other.shape != value.shape:
        return _structure(key, value, other)
    differing = np.flatnonzero(as_bits(value) != as_bits(other))
    distances, nan = _distances(value, other, differing)
    found = Difference(
        key,
        "bits",
        mismatched=len(differing),
        total=_elements(value),
        first_index=multi_index(value.shape, int(differing[0])),
        last_index=multi_index(value.shape, int(differing[-1])),
        max_ulp=int(distances.max()) if len(distances) else None,
        nan_mismatches=nan,
        ulp_histogram=_histogram(distances, nan),
        expected_digest=digest(value),
        observed_digest=digest(other),
        expected_first=_show(value, int(differing[0])),
        observed_first=_show(other, int(differing[0])),
        runs=_runs(differing),
    )
    if key.role == "direction":  # the twin's is the reported one, where that is near enough
        return replace(found, kind="direction", detail="farther from the whole matrix's than roundings leave it")
    if key.role != "norm":
        return found
    bound = norm_bound(key, expected)
    in_fp32 = 1 << 29 if value.dtype == "fp64" else 1  # an ULP of fp32 is 2^29 of fp64
    if not nan and found.max_ulp is not None and found.max_ulp <= bound * in_fp32:
        return None
    return replace(found, kind="norm", detail=f"more than {bound} ULPs of fp32 from the exact norm")


def norm_bound(key: Key, expected: Logical) -> int:
    """How many fp32 ULPs a norm may be off, from the narrowest gradient dtype expected after the same operation."""
    dtypes = {value.dtype for other, value in expected.items() if other.op == key.op and other.role == "grad"}
    return max((NORM_ULPS[dtype] for dtype in dtypes if dtype in NORM_ULPS), default=NORM_ULPS["fp32"])


def _structure(key: Key, value: Value, other: Value) -> Difference:
    dtype_differs = other.dtype != value.dtype
    parts = []
    if dtype_differs:
        parts.append(f"dtype {other.dtype} instead of {value.dtype}")
    if other.shape != value.shape:
        parts.append(f"shape {list(other.shape)} instead of {list(value.shape)}")
    return Difference(
        key,
        "dtype" if dtype_differs else "shape",
        mismatched=_elements(value),
        total=_elements(value),
        expected_digest=digest(value),
        observed_digest=digest(other),
        expected_first=_show(value, 0),
        observed_first=_show(other, 0),
        detail=", ".join(parts),
    )


def _elements(value: Value) -> int:
    return len(as_bits(value))


def _distances(value: Value, other: Value, differing: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.uint64], int]:
    """Distances of the deviating elements, NaNs left out, and how many NaNs there are."""
    if value.dtype in ("utf8", "bool"):
        return np.empty(0, np.uint64), 0
    a, b = as_numbers(value)[differing], as_numbers(other)[differing]
    if value.dtype.startswith(("fp", "bf")):
        with np.errstate(invalid="ignore"):  # comparing a signalling NaN warns
            nan = np.isnan(a) | np.isnan(b)
        return ulp_distance(as_bits(value)[differing[~nan]], as_bits(other)[differing[~nan]]), int(nan.sum())
    wide = [side.astype(np.int64) for side in (a, b)]
    high, low = np.maximum(*wide), np.minimum(*wide)
    return high.view(np.uint64) - low.view(np.uint64), 0


def ulp_distance(a: Bits, b: Bits) -> npt.NDArray[np.uint64]:
    """How many representable numbers apart, from the bit patterns of numbers that are not NaN; shape (n,).

    IEEE formats order like sign and magnitude: within a sign the magnitudes subtract, across zero they add,
    and the two zeros are 0 apart.
    """
    sign = np.uint64(1 << (a.dtype.itemsize * 8 - 1))
    wide_a, wide_b = a.astype(np.uint64), b.astype(np.uint64)
    size_a, size_b = wide_a & (sign - np.uint64(1)), wide_b & (sign - np.uint64(1))
    apart = np.maximum(size_a, size_b) - np.minimum(size_a, size_b)
    distance: npt.NDArray[np.uint64] = np.where((wide_a ^ wide_b) & sign, size_a + size_b, apart)
    return distance


def _histogram(distances: npt.NDArray[np.uint64], nan: int) -> tuple[tuple[str, int], ...]:
    """Counts by power of two: `0` (signs of zero), `1`, `2-3`, `4-7` …, `nan`."""
    counts: dict[int, int] = {}
    for distance in distances.tolist():
        counts[distance.bit_length()] = counts.get(distance.bit_length(), 0) + 1
    labelled = [(_bucket(bits), counts[bits]) for bits in sorted(counts)]
    return tuple([*labelled, ("nan", nan)] if nan else labelled)


def _runs(at: npt.NDArray[np.intp]) -> tuple[tuple[int, int], ...]:
    """Ascending flat indices as `(start, length)` of consecutive ones, the first `RUNS`."""
    starts = np.flatnonzero(np.diff(at, prepend=at[0] - 2) != 1)
    lengths = np.diff(starts, append=len(at))
    return tuple((int(at[start]), int(n)) for start, n in zip(starts[:RUNS], lengths[:RUNS], strict=True))


def _bucket(bits: int) -> str:
    return str(bits) if bits < 2 else f"{1 << (bits - 1)}-{(1 << bits) - 1}"


def _show(value: Value, at: int) -> str:
    """One element as number and bit pattern; text as a whole."""
    if value.dtype == "utf8":
        return repr(value.data.decode("utf-8", "replace"))
    if not value.data:
        return ""
    number, bits = as_numbers(value)[at], as_bits(value)
    return f"{number.item()!r} (0x{int(bits[at]):0{bits.dtype.itemsize * 2}x})"


def _with_ranks(found: list[Difference], expected: Logical, records: Iterable[Record]) -> list[Difference]:
    """The differences with the ranks that hold deviating elements; those of missing values stay unknown."""
    wanted = {d.key for d in found if not d.ranks}
    pieces: dict[Key, list[Record]] = {}
    for record in every_rank(records):
        key = record_key(record)
        if key in wanted:
            pieces.setdefault(key, []).append(record)
    return [
        replace(d, ranks=_deviating_ranks(pieces[d.key], expected.get(d.key))) if d.key in pieces and not d.ranks else d
        for d in found
    ]


def _deviating_ranks(pieces: Sequence[Record], expected: Value | None) -> tuple[int, ...]:
    """The ranks whose piece is not what is expected in its box."""

    def deviates(piece: Record) -> bool:
        if expected is None or (piece.dtype, piece.shape) != (expected.dtype, expected.shape):
            return True
        return bool((as_bits(piece) != as_bits(expected)[elements_of(piece)]).any())

    return tuple(sorted({piece.rank for piece in pieces if deviates(piece)}))
