"""What a comparison finds: differences as data, counted by role.

An `EntryDifference` is one name under which the two checkpoints hold different things. A `Comparison` is all of them,
with what was compared; it is equal only if something was compared and nothing was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardproof.codec import to_plain

STRUCTURE = ("missing", "extra", "kind", "dtype", "shape", "gap", "overlap")
"""Kinds of difference in what there is: `missing` is in A only, `extra` in B only, `kind` a tensor against a plain
value. The others are `bits` of a tensor and `value` of a plain one."""


@dataclass(frozen=True, slots=True)
class EntryDifference:
    """One difference.

    * role: what the value is to training, as far as its name tells (`roles`).
    * a, b: what each side has, in words: dtype and shape, or a plain value; empty where it has nothing.
    * mismatched, total: elements. first_index, last_index: of those that differ, one entry a dim.
    * first_a, first_b: the first of them, as number and bits.
    * max_ulp: the largest distance in units in the last place, of integers the absolute difference; None where it has
      no meaning. nan: elements that are NaN on either side, which have no distance.
    * ulp_histogram: `(distances, count)` by power of two.
    * pieces_a, pieces_b: in how many pieces each side stores it.
    * detail: what is wrong with a structure. explanation: a mechanism that makes exactly these bits, in a sentence.
    * mechanism: its name, for programs.
    """

    name: str
    role: str
    kind: str
    a: str = ""
    b: str = ""
    mismatched: int = 0
    total: int = 0
    first_index: tuple[int, ...] = ()
    last_index: tuple[int, ...] = ()
    first_a: str = ""
    first_b: str = ""
    max_ulp: int | None = None
    nan: int = 0
    ulp_histogram: tuple[tuple[str, int], ...] = ()
    pieces_a: int = 0
    pieces_b: int = 0
    detail: str = ""
    mechanism: str = ""
    explanation: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its path, form, and how much it holds; foreign: names in its pickles that are no plain data."""

    path: str
    form: str
    tensors: int
    plain: int
    nbytes: int
    foreign: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All that was found.

    compared: role → number of names that both have. elements: number of tensor elements compared bit by bit. hint: what
    to try where no name is on both sides. read_bytes: of files. checksums: whether they were verified. left_out: names
    that the user did not ask for, one that both sides have counted once.
    """

    a: Side
    b: Side
    found: tuple[EntryDifference, ...]
    compared: Mapping[str, int]
    elements: int
    hint: str = ""
    read_bytes: int = 0
    checksums: bool = True
    left_out: int = 0

    @property
    def equal(self) -> bool:
        """Whether both hold the same, bit for bit."""
        return not self.found

    def counts(self) -> dict[str, dict[str, int]]:
        """Role → `compared`, `equal`, and number of differences by kind."""
        table: dict[str, Counter[str]] = {role: Counter(compared=n, equal=n) for role, n in self.compared.items()}
        for one in self.found:
            row = table.setdefault(one.role, Counter(compared=0, equal=0))
            row[one.kind] += 1
            if one.kind not in ("missing", "extra"):
                row["equal"] -= 1
        return {role: dict(row) for role, row in sorted(table.items())}

    def to_json(self) -> dict[str, Any]:
        """All of it in JSON types, every difference too."""
        kept = {name: getattr(self, name) for name in ("elements", "read_bytes", "checksums", "left_out", "hint")}
        found = [to_plain(one) for one in self.found]
        return {
            "equal": self.equal, "a": to_plain(self.a), "b": to_plain(self.b), **kept,
            "counts": self.counts(), "differences": found,
        }  # fmt: skip


def in_order(found: Iterable[EntryDifference]) -> tuple[EntryDifference, ...]:
    """Structure before bits, then by role and name."""
    kinds = (*STRUCTURE, "bits", "value")
    return tuple(sorted(found, key=lambda one: (kinds.index(one.kind), one.role, one.name)))
