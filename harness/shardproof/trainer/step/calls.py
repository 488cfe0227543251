"""Where two ways to compute the same part, by what each module came to on every rank (`shardproof.trainer.rank.calls`).

*Verifies*: the first output, in the order of the calls, whose bits differ. *Does not verify*: that the module is to
blame for it, and not what it was given beside its input, such as its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from shardproof.observe.record import Record
from shardproof.trainer.arms import CALLS


class Call(NamedTuple):
    """A call of a module: its path, its class, a digest of its output, and a sketch of it: the number of its elements,
    their norm and a weighted sum; and a digest of what it was given. Each is empty where nobody could read it."""

    path: str
    kind: str
    digest: str
    sketch: Sequence[float] = ()
    given: str = ""

    def is_finite(self) -> bool:
        """Whether the output has no element that is NaN or infinite, as far as it could be read."""
        return all(isfinite(number) for number in self.sketch)

    def like(self, other: Call, near: float) -> bool | None:
        """Whether another call came to the same, bit for bit or up to a share of the norm; None where that cannot be
        told, as of pieces of another size."""
        if not (self.digest and other.digest) or self.sketch[:1] != other.sketch[:1]:
            return None
        if self.digest == other.digest or not near:
            return self.digest == other.digest
        most = near * max((*self.sketch[1:2], *other.sketch[1:2]), default=0.0)
        return all(abs(a - b) <= most for a, b in zip(self.sketch[1:], other.sketch[1:], strict=True))

    @property
    def name(self) -> str:
        return f"{self.path} ({self.kind})" if self.path else f"the model itself ({self.kind})"


class Called(NamedTuple):
    """The calls of a step on one rank: forward, and anew in the backward."""

    forward: tuple[Call, ...]
    anew: tuple[Call, ...]


OfRanks = Mapping[int, Called]


def calls_by_op(records: Iterable[Record]) -> dict[int, dict[int, Called]]:
    """Operation → rank → its calls."""
    found: dict[int, dict[int, Called]] = {}
    for record in records:
        if record.role == CALLS:
            said = json.loads(record.data)
            called = Called(*(tuple(Call(*one) for one in said[key]) for key in Called._fields))
            found.setdefault(record.op, {})[record.rank] = called
    return found


REDUCED = ", at how gradients are reduced"
"""Where to look, of several ranks."""


def where_they_part(
    first: OfRanks, own: OfRanks, names: tuple[str, str], near: float = 0.0, *, stepped: bool = True, left: bool = False
) -> str:
    """A sentence about the first module that comes to something else; empty where no module was seen.

    Args:
        first, own: rank → calls, of either way. names: how a sentence about either begins, such as `With shard=no`.
        near: up to which share of its norm an output counts as the same; 0 for its bits. stepped: whether an optimizer
            may have had a gradient of what differs. left: whether the backward is known to leave gradients of the same
            lengths.
    """
    ranks = sorted(first.keys() & own.keys())
    apart = (_apart(first[rank].forward, own[rank].forward, rank, near) for rank in ranks)
    told = next(filter(None, apart), "")
    number = sum(len(own[rank].forward) for rank in ranks)
    if told or not number or any(not _same(first[rank], own[rank], near) for rank in ranks):
        return told
    several = len({*first, *own}) > 1
    equal = "equal up to rounding" if near else "equal"
    told = f"In this step the outputs of all {number} calls of modules are {equal}"
    if not stepped:
        return f"{told}, and no optimizer had a gradient of what differs."
    if left:
        behind = f"look at what comes behind it{REDUCED * several}."
        return f"{told}, and the gradients that the backward leaves are as long: {behind}"
    return f"{told}: look at the backward{REDUCED * several}, and at the optimizer."


def recomputed_apart(first: OfRanks, own: OfRanks, names: tuple[str, str], near: float = 0.0) -> str:
    """A sentence about a module that the backward computes anew in one of two ways, and otherwise than the forward did;
    empty where there is none. Arguments as in `where_they_part`."""
    ways = [(way[rank], name) for rank in sorted(first.keys() & own.keys())
            for way, name in zip((first, own), names, strict=True)]  # fmt: skip
    return next(filter(None, (_recomputed(way, name, near) for way, name in ways)), "")


def recomputed(called: OfRanks, step: int) -> str:
    """A note on a module that the backward of a step computes anew, and otherwise than the forward did; empty where
    there is none."""
    way = f"in step {step}"
    return next(filter(None, (_recomputed(called[rank], way, 0.0) for rank in sorted(called))), "").rstrip(".")


def _apart(first: Sequence[Call], own: Sequence[Call], rank: int, near: float) -> str:
    for number, (one, other) in enumerate(zip(first, own, strict=False)):
        if (one.path, one.kind) != (other.path, other.kind):
            return ""  # the two ways are not made of the same modules
        if one.like(other, near) is False:
            given = _given(one, other, near if number else 0.0)
            return f"The first module whose output differs is {one.name}, on rank {rank}{given}."
    return ""


def _given(one: Call, other: Call, near: float) -> str:
    """Whether the first module that came to something else was given the same, in words. What came out of another
    module may be apart by rounding alone, of which a digest says nothing; what the model is given may not."""
    if not (one.given and other.given):
        return ""
    if one.given == other.given:
        return ", and it was given the same"
    return "" if near else (
        ", and what it was given differs already: look at the data, and at what is computed between modules"
    )  # fmt: skip


def _same(first: Called, own: Called, near: float) -> bool:
    """Whether the same modules were called, and came to the same as far as they could be read."""
    one, other = ([call for call in called.forward if call.digest] for called in (first, own))
    return len(one) == len(other) and all(
        (a.path, a.kind) == (b.path, b.kind) and a.like(b, near) for a, b in zip(one, other, strict=True)
    )


def first_not_finite(called: OfRanks) -> str:
    """The first module whose output has a NaN or infinity, in the order of a rank's calls; empty where none has."""
    return next((call.name for rank in sorted(called) for call in called[rank].forward if not call.is_finite()), "")


def _recomputed(called: Called, name: str, near: float) -> str:
    """Of a module that the backward computes anew, and that comes to something else than in the forward."""
    known: dict[tuple[str, str], list[Call]] = {}
    for call in called.forward:
        known.setdefault((call.path, call.kind), []).append(call)
    other = next(_unlike(called.anew, known, near), None)
    return "" if other is None else (
        f"{name} the backward computes {other.name} anew, and comes to another output than the forward did: look "
        "at what has to be the same then, such as random states, autocast and recipes of quantization."
    )  # fmt: skip


def _unlike(anew: Iterable[Call], known: Mapping[tuple[str, str], Sequence[Call]], near: float) -> Iterator[Call]:
    for call in anew:
        outputs = known.get((call.path, call.kind), ())
        if outputs and all(call.like(output, near) is False for output in outputs):
            yield call
