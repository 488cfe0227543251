"""Two runs of an optimizer side by side, or one run before a save and after a load. Runs in a warm worker.

For example, after the second step on two ranks `up.weight` is, put together, 112 numbers; the run on whole tensors has
112 as well, and `deviations` says in how many they differ, which the first is, and how far apart they are: in units in
the last place, and as a share of what the steps have changed so far.

*Verifies*: parameters, state of the parameters' shape, and everything else that each rank holds as its own and that has
the same shape on both sides, bit for bit; that ranks agree on what is not sharded.
*Does not verify*: state whose shape depends on the sharding, which has no counterpart on whole tensors; it is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shardproof.diff import as_numbers, ulp_distance
from shardproof.layout import multi_index
from shardproof.observe.assemble import as_bits, assemble
from shardproof.observe.logical import Problem, Value
from shardproof.observe.record import Record
from shardproof.world.observations import read_observations

ROUNDING_SHARE = 2.0**-10
"""Differences of at most this share of what the steps changed are called rounding: a sum over a sharded tensor is added
up in another order. A norm taken over a shard instead of the tensor is off by more, on tensors as small as ours."""

ROUNDING_ULPS = 4
"""So many units in the last place of an element are rounding, whatever its share."""

OWN_ROUNDING, MOST_ROUNDING = 4.0, 2.0**-4
"""Rounding is also what is at most four times as large as what another order of rows and columns makes, where that is
little: an optimizer that orthogonalises in bf16 rounds more coarsely than a sum in fp32."""

JOINED, APART = ("param", "state"), ("own", "setting")

Name = tuple[str, str]
"""Role, and name."""

Shares = Mapping[str, float]
"""Name of a parameter → the share that a change of the order of its rows and columns makes."""


@dataclass(frozen=True)
class Deviation:
    """One value that is not the same on both sides.

    * kind: `bits`; `missing` on the right side; `shape` or `dtype`; `ranks`: those of the right side disagree, and what
      assembly finds wrong with pieces (`gap`, `overlap`, `replica_conflict`).
    * count, total: elements that differ, and all. left, right: the first of them. ulps: the largest distance, -1 where
      that has no meaning. share: the largest difference, of the largest change.
    """

    op: int
    role: str
    name: str
    kind: str
    count: int = 0
    total: int = 0
    index: str = ""
    left: str = ""
    right: str = ""
    ulps: int = -1
    share: float = 0.0
    rounding: bool = False


@dataclass
class Held:
    """What a run held.

    * ops: operations after which something was seen.
    * values: op → role and name → the value, put together or equal on all ranks.
    * unlike: op → names of which ranks hold different things, with those things.
    * problems: what is wrong with pieces. facts: what was recorded beside.
    """

    ops: set[int]
    values: dict[int, dict[Name, Value]]
    unlike: dict[int, dict[Name, dict[int, Value]]]
    problems: list[Problem]
    facts: dict[str, float]


def held(paths: Iterable[str]) -> Held:
    """What the observation files of a run's ranks hold."""
    joined: list[Record] = []
    apart: dict[int, dict[Name, dict[int, Value]]] = {}
    facts: dict[str, float] = {}
    ops: set[int] = set()
    for record in _records(paths):
        ops.add(record.op)
        value = Value(record.dtype, record.shape, record.data)
        if record.role in JOINED:
            joined.append(record)
        elif record.role in APART:
            apart.setdefault(record.op, {}).setdefault((record.role, record.fqn), {})[record.rank] = value
        elif record.role == "fact":
            facts[record.fqn] = float(as_numbers(value)[0])
        elif record.role == "opaque":
            facts[f"not compared: {record.fqn}"] = 1.0
    logical, problems = assemble(joined)
    values: dict[int, dict[Name, Value]] = {}
    for key, value in logical.items():
        values.setdefault(key.op, {})[key.role, key.fqn] = value
    unlike: dict[int, dict[Name, dict[int, Value]]] = {}
    for op, names in apart.items():
        for name, ranks in names.items():
            first = next(iter(ranks.values()))
            if all(value == first for value in ranks.values()):
                values.setdefault(op, {})[name] = first
            else:
                unlike.setdefault(op, {})[name] = ranks
    return Held(ops, values, unlike, problems, facts)


def _records(paths: Iterable[str]) -> Iterator[Record]:
    """The records of ranks, some of which may have died while they wrote."""
    for path in paths:
        try:
            yield from read_observations(Path(path))
        except ValueError:
            continue


def serve(payload: bytes) -> bytes:
    """Worker entry. The request and the answer are JSON.

    * Asked: `left` and `right`, the observation files of two runs, which may be the same; `pairs`, of operations to
      compare, left and right; `roles`; `order`, a `Shares`.
    * Answered: `deviations`, those that are no rounding first; `compared`, of how many pairs both sides are there;
      `states`, how many values of state the left side has at the last pair; `facts`; and `not_compared`.
    """
    request = json.loads(payload)
    left = held(request["left"])
    right = left if request["right"] == request["left"] else held(request["right"])
    found: list[Deviation] = []
    skipped: set[str] = set()
    for mine, theirs in request["pairs"]:
        if theirs in right.ops:
            found += deviations(left, right, mine, theirs, request["roles"], skipped, request["order"])
    found.sort(key=lambda d: (d.rounding, d.op, d.role != "param"))
    names = left.values.get(request["pairs"][-1][0], {})
    reply = {
        "deviations": [asdict(deviation) for deviation in found],
        "compared": sum(1 for _, theirs in request["pairs"] if theirs in right.ops),
        "states": sum(_is_state(role, value) for (role, _), value in names.items()),
        "facts": left.facts | right.facts,
        "not_compared": sorted(skipped),
    }
    return json.dumps(reply).encode()


def deviations(
    left: Held, right: Held, mine: int, theirs: int, roles: Sequence[str], skipped: set[str], order: Shares
) -> Iterator[Deviation]:
    """What differs between two operations. skipped: receives the names of what has no counterpart."""
    strict = left is right
    for problem in right.problems:
        if problem.key.op == theirs and problem.key.role in roles:
            yield Deviation(theirs, problem.key.role, problem.key.fqn, problem.kind, right=problem.detail)
    others, unlike = right.values.get(theirs, {}), right.unlike.get(theirs, {})
    broken = {(p.key.role, p.key.fqn) for p in right.problems if p.key.op == theirs}
    held_state = any(role in ("state", "own") for role, _ in (*others, *unlike))
    for name, value in left.values.get(mine, {}).items():
        role, text = name
        if role not in roles or name in broken:
            continue
        if name in others:
            found = _values(theirs, name, value, others[name], skipped)
            if found is True:
                slack = order.get(text.partition("|")[0], 0.0)
                yield _bits(theirs, name, value, others[name], _scale(left, mine, name, value), slack)
            elif isinstance(found, Deviation):
                yield found
        elif name in unlike:
            yield from _of_ranks(theirs, name, value, unlike[name], skipped)
        elif strict or role == "param" or not held_state:
            yield Deviation(theirs, role, text, "missing", total=_count(value))
        else:
            skipped.add(text)
    for name, ranks in left.unlike.get(mine, {}).items():
        if strict and name[0] in roles and ranks != unlike.get(name, ranks if name not in others else None):
            first = min(ranks)
            yield Deviation(theirs, *name, "missing" if name not in unlike else "ranks", left=_shown(ranks[first]))


def _of_ranks(op: int, name: Name, value: Value, ranks: Mapping[int, Value], skipped: set[str]) -> Iterator[Deviation]:
    """What ranks hold as their own and do not agree about, where whole tensors have one value."""
    if any((other.dtype, other.shape) != (value.dtype, value.shape) for other in ranks.values()):
        skipped.add(name[1])
        return
    said = ", ".join(f"rank {rank} has {_shown(other)}" for rank, other in sorted(ranks.items()))
    yield Deviation(op, *name, "ranks", total=_count(value), left=_shown(value), right=said)


def _values(op: int, name: Name, value: Value, other: Value, skipped: set[str]) -> Deviation | bool | None:
    """How two values differ, if not in their bits alone; True where it takes a look at those. None: they do not."""
    if value == other:
        return None
    if value.shape != other.shape:
        if name[0] in JOINED:
            return Deviation(op, *name, "shape", left=str(list(value.shape)), right=str(list(other.shape)))
        skipped.add(name[1])
        return None
    if "utf8" in (value.dtype, other.dtype):
        return Deviation(op, *name, "bits", 1, 1, left=_shown(value), right=_shown(other))
    if value.dtype != other.dtype:
        if _count(value) == 1 and np.array_equal(as_numbers(value), as_numbers(other)):
            return None  # a count that was an integer before it went through a file
        return Deviation(op, *name, "dtype", left=value.dtype, right=other.dtype)
    return True


def _bits(op: int, name: Name, value: Value, other: Value, scale: float, order: float) -> Deviation:
    """Where and how far two values of one dtype and shape are apart. scale: what shares are of. order: see `Shares`."""
    at = np.flatnonzero(as_bits(value) != as_bits(other))
    a, b = (as_numbers(side).astype(np.float64)[at] for side in (value, other))
    finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
    is_float = value.dtype.startswith(("fp", "bf"))
    ulps = ulp_distance(as_bits(value)[at], as_bits(other)[at]) if finite and is_float else None
    shares = np.abs(a - b) / scale if scale and finite else np.full(len(at), np.inf)
    bound = max(ROUNDING_SHARE, OWN_ROUNDING * order if order <= MOST_ROUNDING else 0.0)
    near = shares <= bound if ulps is None else (shares <= bound) | (ulps <= ROUNDING_ULPS)
    return Deviation(
        op, *name, "bits", len(at), _count(value), str(list(multi_index(value.shape, int(at[0])))),
        repr(float(a[0])), repr(float(b[0])), -1 if ulps is None else int(ulps.max()), float(min(shares.max(), 1e9)),
        is_float and bool(near.all()),
    )  # fmt: skip


def _scale(left: Held, op: int, name: Name, value: Value) -> float:
    """What a difference is measured by: of a parameter, the largest change since it was built; of all else, the largest
    value."""
    if value.dtype == "utf8":
        return 0.0
    now = as_numbers(value).astype(np.float64)
    start = left.values.get(min(left.values), {}).get(name) if name[0] == "param" else None
    changed = now - as_numbers(start).astype(np.float64) if start and start.shape == value.shape else now
    finite = changed[np.isfinite(changed)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _is_state(role: str, value: Value) -> bool:
    """Whether something is state; some optimizers keep theirs in their param groups, where numbers are settings."""
    return role in ("state", "own") or (role == "setting" and value.dtype != "utf8" and _count(value) > 1)


def _count(value: Value) -> int:
    return 1 if value.dtype == "utf8" else int(np.prod(value.shape, dtype=np.int64))


def _shown(value: Value) -> str:
    if value.dtype == "utf8":
        return value.data.decode()
    numbers = as_numbers(value)
    return repr(float(numbers[0])) if len(numbers) == 1 else f"{len(numbers)} numbers"
