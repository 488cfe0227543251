"""Logical values: what an observation is after assembly, and the terms in which an oracle predicts.

A `Key` says what a value is, such as `exp_avg` of `up.weight` after operation 3, live; a `Value` has the whole tensor's
dtype, shape and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Key(NamedTuple):
    """Identifies a logical value: the index of the operation, `live` or `written`, the role such as `exp_avg`, and the
    fully qualified name."""

    op: int
    where: str
    role: str
    fqn: str


class Value(NamedTuple):
    """A whole logical tensor: dtype name (see record.NUMPY_NAME), shape, raw row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """A defect of assembly itself: `gap`, `overlap`, `replica_conflict`, `shape`, `dtype` or
    `size`, or `unreadable` for a checkpoint that the independent reader refuses.

    ranks: the ranks involved. detail: one sentence with the boxes or digests.
    """

    key: Key
    kind: str
    ranks: tuple[int, ...]
    detail: str


Logical = dict[Key, Value]
