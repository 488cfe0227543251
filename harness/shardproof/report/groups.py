"""The differences of a result in the order in which a person looks for a cause: by operation, then by role, then by
tensor.

A save that writes twelve parameters wrongly is 36 or 88 rows in a flat list, and one sentence here: operation 2 (save),
written exp_avg, 12 tensors. Page and terminal show the same groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardproof.diagnosis.rules.engine import CAUSE_FIRST
from shardproof.diff import STRUCTURE, Difference
from shardproof.observe.record import LIVE
from shardproof.result import Result
from shardproof.tensor_pictures import Elements, Picture
from shardproof.wording.titles import THINGS


@dataclass(frozen=True)
class Tensor:
    """A value with its differences. `number` is the index of the value's picture within the result; None without a
    picture."""

    name: str
    differences: tuple[Difference, ...]
    picture: Picture | None = None
    number: int | None = None

    @property
    def first(self) -> Difference:
        return self.differences[0]

    @property
    def ranks(self) -> str:
        """Which ranks hold the wrong value, or wrote it to the checkpoint; empty where the ranks are not known."""
        if not self.first.ranks:
            return ""
        named = f"rank{'s' * (len(self.first.ranks) > 1)} {', '.join(map(str, self.first.ranks))}"
        return f"on {named}" if self.first.key.where == LIVE else f"as {named} wrote it"

    @property
    def summary(self) -> str:
        """What is wrong, in a few words: `37 of 112 elements, up to 513 ULP`."""
        worst = next((d for d in self.differences if d.kind in ("bits", "norm")), self.first)
        if worst.kind in STRUCTURE:
            return worst.detail or self._alone(worst)
        if worst.total == 1 and worst.expected_first and worst.observed_first:
            expected, observed = (text.partition(" (0x")[0] for text in (worst.expected_first, worst.observed_first))
            return f"{observed} instead of {expected}"
        parts = [f"{worst.mismatched} of {worst.total} elements"]
        if worst.max_ulp is not None:
            parts.append(f"up to {worst.max_ulp} ULP")
        if worst.nan_mismatches:
            parts.append(f"{worst.nan_mismatches} NaN")
        return ", ".join(parts)

    @staticmethod
    def _alone(difference: Difference) -> str:
        """What only one side has: its number, of several elements how many."""
        found = difference.observed_first or difference.expected_first
        if difference.total != 1:
            return f"{difference.total} elements" if difference.total else ""
        return found.partition(" (0x")[0]


@dataclass(frozen=True)
class Role:
    """The values of one role, live or written, that differ after an operation."""

    role: str
    where: str
    tensors: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """As everywhere in reports: `written exp_avg`."""
        return self.role if self.where == LIVE else f"{self.where} {self.role}"

    @property
    def meaning(self) -> str:
        """What the role is, where a plain word says it better; empty where the name does."""
        told = THINGS.get(self.role, "")
        return "" if told.replace("the ", "").rstrip("s") == self.role.rstrip("s") else told

    @property
    def kinds(self) -> str:
        """How many differ in which way: `bits × 7`, `missing × 3, dtype × 1`."""
        return counted(d for tensor in self.tensors for d in tensor.differences)


COPIES = (
    "Copies of a value are numbered from 0 as they are read: what several ranks hold of it, or what a checkpoint keeps"
    " twice, such as a weight among the model's and again among the optimizer's."
)
"""What a message calls a copy, for who reads that two of them differ."""


@dataclass(frozen=True)
class Operation:
    """An operation after which something differs. first: whether it is the first one, where the cause is."""

    index: int
    kind: str
    roles: tuple[Role, ...]
    first: bool

    @property
    def name(self) -> str:
        return f"operation {self.index} ({self.kind})" if self.kind else "no operation"

    @property
    def has_copies(self) -> bool:
        """Whether copies of a value differ, so that a reader needs `COPIES`."""
        conflicts = (d for r in self.roles for t in r.tensors for d in t.differences if d.kind == "replica_conflict")
        return any("copy " in d.detail or "copies " in d.detail for d in conflicts)

    @property
    def size(self) -> int:
        """How many tensors."""
        return sum(len(role.tensors) for role in self.roles)


def grouped(result: Result, elements: Elements) -> tuple[Operation, ...]:
    """The differences of a result, in groups; the first is the one to look at."""
    kinds = {index: kind for index, (_, kind) in enumerate(result.operations)}
    numbers = {picture.key: n for n, picture in enumerate(elements.pictures)}
    tensors: dict[tuple[int, str, str], dict[str, list[Difference]]] = {}
    for difference in result.differences:
        key = difference.key
        tensors.setdefault((key.op, key.where, key.role), {}).setdefault(key.fqn, []).append(difference)
    found: dict[int, list[Role]] = {}
    for (op, where, role), named in sorted(tensors.items(), key=lambda item: _rank(item[0])):
        of_role = tuple(
            Tensor(name, tuple(ds), elements.by_key.get(ds[0].key), numbers.get(ds[0].key))
            for name, ds in named.items()
        )
        found.setdefault(op, []).append(Role(role, where, of_role))
    first = min(found, default=None)
    return tuple(Operation(op, kinds.get(op, ""), tuple(roles), op == first) for op, roles in sorted(found.items()))


def counted(differences: Iterable[Difference]) -> str:
    """Differences by kind, the most frequent first."""
    return ", ".join(f"{kind} × {n}" for kind, n in Counter(d.kind for d in differences).most_common())


def first_picture(operations: Sequence[Operation]) -> Tensor | None:
    """The tensor that a reader looks at first: the first one with elements, of the first operation that has any."""
    tensors = (tensor for op in operations for role in op.roles for tensor in role.tensors)
    return next((tensor for tensor in tensors if tensor.picture), None)


def _rank(group: tuple[int, str, str]) -> tuple[int, bool, int, str]:
    """Live before written, and roles in the order in which a step computes them."""
    op, where, role = group
    return op, where != LIVE, CAUSE_FIRST.index(role) if role in CAUSE_FIRST else len(CAUSE_FIRST), role
