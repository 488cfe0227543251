"""The data types of diagnosis: the context that a rule receives, the finding that it returns, and the explanation that
a reader sees.

A `Rule` is called with a `Difference` and a `Context`: everything expected and observed, the program, and the
expectation of a run in which no load did anything. It answers with a `Finding`, or None. Findings of one mechanism are
joined into an `Explanation`, whose text reads like a sentence: *The load had no effect on some state: master of
up.weight is unchanged by operation 5 (load).*
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from shardproof.diagnosis.arrangement import distinct
from shardproof.diff import Difference, as_numbers
from shardproof.loading import widest_model
from shardproof.models import ModelSpec, model_spec
from shardproof.observe.assemble import Bits, as_bits, record_key
from shardproof.observe.logical import Key, Logical, Value
from shardproof.observe.record import WRITTEN, Record, every_rank
from shardproof.oracle.inputs import Inputs
from shardproof.program import LOADS, Op
from shardproof.scenario import Scenario

Confidence = Literal["certain", "likely", "possible"]
CONFIDENCES: tuple[Confidence, ...] = ("certain", "likely", "possible")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Explanation:
    """A mechanism that differences match.

    * mechanism: stable name, for clustering.
    * confidence: `certain` (the bits are exactly what the mechanism produces, in more places than chance allows),
      `likely` or `possible`.
    * text: one to three sentences.
    * evidence: one mapping of JSON types for each difference explained.
    * bug_ids: entries of the bug corpus with this mechanism.
    """

    mechanism: str
    confidence: Confidence
    text: str
    evidence: tuple[Mapping[str, Any], ...]
    bug_ids: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """What a rule found about one difference. clause: part of a sentence that names tensor, ranks and operations.
    evidence: JSON types."""

    confidence: Confidence
    clause: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """A mechanism, and how it is recognised.

    mechanism: stable name. lead: the sentence that opens its explanation, followed by the findings' clauses. find:
    looks at one difference. bug_ids: entries of the bug corpus.
    """

    mechanism: str
    lead: str
    find: Callable[[Difference, Context], Finding | None]
    bug_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """An expected and an observed value of equal dtype and shape. at: flat indices of the elements that differ."""

    expected: Value
    observed: Value
    at: npt.NDArray[np.intp]

    @cached_property
    def expected_bits(self) -> Bits:
        return as_bits(self.expected)[self.at]

    @cached_property
    def observed_bits(self) -> Bits:
        return as_bits(self.observed)[self.at]

    @cached_property
    def wanted(self) -> Floats:
        """Expected numbers where they differ."""
        return as_numbers(self.expected)[self.at].astype(np.float64)

    @cached_property
    def got(self) -> Floats:
        """Observed numbers where they differ."""
        return as_numbers(self.observed)[self.at].astype(np.float64)

    @property
    def is_float(self) -> bool:
        return self.expected.dtype.startswith(("fp", "bf"))

    def explained_by(self, other: Value) -> bool:
        """Whether every deviating element has the bits that `other` has in its place."""
        if other.dtype != self.observed.dtype or len(other.data) != len(self.observed.data):
            return False
        return bool((as_bits(other)[self.at] == self.observed_bits).all())

    @property
    def strength(self) -> Confidence:
        """How far a match is from chance: by the number of distinct bit patterns that matched. A tensor of zeros
        matches any other."""
        values = distinct(self.observed_bits)
        return "certain" if values >= 3 else "likely" if values == 2 else "possible"


LIKE = {
    "apply_gradients": "step",
    **dict.fromkeys(("load_optimizer_only", "load_schedule_only", "recall"), "load"),
    **dict.fromkeys(("save_kept", "finish_save"), "save"),
}
"""Kind of operation → the kind that rules take it for."""


T = TypeVar("T")


class ValueLookup(Protocol):
    """A mapping that computes values when a rule asks for them, such as the values of the cold run. Most rules need
    only a few."""

    def get(self, key: Key, /) -> Value | None:
        """The value of a key; None where there is none."""


@dataclass(frozen=True)
class Context:
    """What rules may look at.

    cold: the values expected of a run in which no load did anything, to recognise what a load left behind. inputs: the
    scenario as the oracles saw it. records: the pieces that ranks hold, or have written, of which `observed` is joined.
    """

    expected: Logical
    observed: Logical
    scenario: Scenario
    ops: tuple[Op, ...]
    cold: ValueLookup
    inputs: Inputs
    records: Sequence[Record] = ()

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, asked once: rules are asked of one difference after the other, and much that they work out
        is the same for all of an operation and a role."""
        if what not in self._made:
            self._made[what] = make()
        made: T = self._made[what]
        return made

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def model(self) -> ModelSpec:
        return model_spec(widest_model(self.scenario))

    def op(self, index: int) -> Op | None:
        """The operation of that index; None for what belongs to no operation."""
        return self.ops[index] if 0 <= index < len(self.ops) else None

    def op_kind(self, index: int) -> str:
        """What an operation is to a rule: the second half of a step is a step, and so for loads of other sources."""
        op = self.op(index)
        return LIKE.get(op.kind, op.kind) if op else ""

    def op_name(self, index: int) -> str:
        """How texts name an operation."""
        op = self.op(index)
        return f"operation {index} ({op.kind if op else ''})"

    def pair(self, difference: Difference) -> Pair | None:
        """The two values of a difference of bits; None for differences of structure."""
        if difference.key not in self._pairs:
            self._pairs[difference.key] = self._pair(difference.key)
        return self._pairs[difference.key]

    @cached_property
    def _pairs(self) -> dict[Key, Pair | None]:
        return {}

    def _pair(self, key: Key) -> Pair | None:
        expected, observed = self.expected.get(key), self.observed.get(key)
        if expected is None or observed is None:
            return None
        if (expected.dtype, expected.shape) != (observed.dtype, observed.shape):
            return None
        at = np.flatnonzero(as_bits(expected) != as_bits(observed))
        return Pair(expected, observed, at) if len(at) else None

    def settings(self, name: str, index: int) -> set[float]:
        """The values that param groups have of a setting after an operation."""
        groups = self.of_role(Key(index, "live", "hyperparameter", ""))
        found = {float(as_numbers(value)[0]) for fqn, value in groups.items() if fqn.rpartition(".")[2] == name}
        return found or {float(getattr(self.scenario.optimizer, name))}

    def pieces(self, key: Key) -> list[Record]:
        """What each rank holds, or has written, of a value: a record for every rank and box."""
        held = self.once(("pieces", key.op), partial(self._pieces_of, key.op))
        return list(every_rank(held.get(key, ())))

    def _pieces_of(self, op: int) -> dict[Key, list[Record]]:
        found: dict[Key, list[Record]] = {}
        for record in self.records:
            if record.op == op:
                found.setdefault(record_key(record), []).append(record)
        return found

    def siblings(self, key: Key) -> Iterator[tuple[Key, Value]]:
        """Expected values of the same role after the same operation under other names."""
        for fqn, value in self.of_role(key).items():
            if fqn != key.fqn:
                yield key._replace(fqn=fqn), value

    def of_role(self, key: Key) -> Mapping[str, Value]:
        """Name → expected value, of all of the same role after the same operation."""
        return self._by_role.get(key[:3], {})

    @cached_property
    def _by_role(self) -> dict[tuple[int, str, str], dict[str, Value]]:
        found: dict[tuple[int, str, str], dict[str, Value]] = {}
        for key, value in self.expected.items():
            found.setdefault(key[:3], {})[key.fqn] = value
        return found

    def taken(self, key: Key) -> int:
        """The index of the operation after which a value was captured. A save may finish later than the capture, for
        example an asynchronous save, or one that writes a state dict kept in memory earlier."""
        op = self.ops[key.op] if key.where == WRITTEN and key.op < len(self.ops) else None
        return op.taken if op is not None and op.taken >= 0 else key.op

    def earlier(self, key: Key) -> Iterator[tuple[int, Value]]:
        """`(operation, expected value)` of the same live tensor after earlier operations, latest first."""
        for index in range(self.taken(key) - 1, -1, -1):
            value = self.expected.get(Key(index, "live", key.role, key.fqn))
            if value is not None:
                yield index, value

    def later(self, key: Key) -> Iterator[tuple[int, Value]]:
        """The same after later operations that go on from there in the same ranks, earliest first."""
        for op in self.ops[self.taken(key) + 1 :]:
            if op.kind in ("build", *LOADS) or op.session != self.ops[key.op].session:
                return
            value = self.expected.get(Key(op.index, "live", key.role, key.fqn))
            if value is not None:
                yield op.index, value


def tensor(key: Key) -> str:
    """How texts name a value: role and name, and whether it is in a checkpoint."""
    return f"{'written ' if key.where == 'written' else ''}{key.role} of {key.fqn}"


def moment(index: int, context: Context) -> str:
    """How texts name the value that a tensor has after an operation."""
    if context.op_kind(index) == "build":
        return f"its initialisation by {context.op_name(index)}"
    return f"its value of {context.op_name(index)}"
