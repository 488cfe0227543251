"""Finds the conditions of a cause: the fewest axis values that separate its failures from passing scenarios.

A cause has forty members, and a reader asks what they have in common that no passing scenario has: *offload is cpu, and
the program loads: 40 of 40 such scenarios fail*. A *term* is one fact of a scenario: the value of an axis
(`load=grow`), a part of a value that has several (`dtype has master=fp32`), that a mesh has more than one rank along an
axis (`tp>1`), or that the program has an operation (`program does load`). A condition is a set of terms, all of which
hold for every member of the cause.

The search, which is the same for the same results:

1. Terms that hold for every member are candidates. Each *excludes* the passing scenarios for which it does not hold.
2. Of candidates that exclude the same, or less than another one, the plainest is kept.
3. All sets of one, two and three of them are tried, in this order. The first that excludes as much as all candidates
   together is the answer. If there is none, the best three are extended, one term after the other.

*Verifies*: that the counts are those of the run's own results.
*Does not verify*: that the condition is the reason. It says what separates what was run; a run of few scenarios is
separated by much that has nothing to do with it, so that a cause with fewer than `FEWEST` members has no condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from shardproof.program import operations
from shardproof.report.cell_axes import FirstValues, axis_texts, first_values
from shardproof.scenario import AXES, Scenario

FEWEST = 2
"""Members that a cause must have, and passing scenarios that there must be."""

CANDIDATES = 40
"""Terms of which sets are tried, those that exclude most: 9,880 sets of three."""

LONGEST = 6
"""How many terms a condition may have."""

LEFT_OUT = ("system", "version", "seed", "faults")
"""Axes that a cause names anyway, or that say nothing of what a library is asked to do."""

MESH_AXES = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Condition:
    """What all failures of one cause have in common. terms: none where nothing tells them from what passes.

    failing: results of the cause, for all of which it holds. passing: results that pass although it holds. others:
    results that pass and for which it does not hold.
    """

    terms: tuple[str, ...]
    failing: int
    passing: int
    others: int

    @property
    def text(self) -> str:
        """A sentence with the counts, for and against."""
        if not self.terms:
            return f"no axis value tells these {self.failing} from the {self.passing} that pass"
        against = f"{self.passing} pass" if self.passing > 1 else f"{self.passing or 'none'} passes"
        return (
            f"{' and '.join(self.terms)}: {self.failing} such scenarios fail and {against}; {self.others} others pass"
        )


def condition_of(failing: Sequence[Scenario], passing: Sequence[Scenario]) -> Condition | None:
    """The fewest terms that all failing scenarios have and as few passing ones as can be; None of too few scenarios."""
    if len(failing) < FEWEST or len(passing) < FEWEST:
        return None
    first = first_values([*failing, *passing])
    held = [terms_of(scenario, first.get(scenario.system, ())) for scenario in (*failing, *passing)]
    excluded = _candidates(frozenset.intersection(*held[: len(failing)]), held[len(failing) :])
    chosen = _fewest(excluded)
    left_out = _joined(excluded[term] for term in chosen).bit_count()
    return Condition(tuple(chosen), len(failing), len(passing) - left_out, left_out)


@lru_cache(maxsize=16384)
def terms_of(scenario: Scenario, first: FirstValues = ()) -> frozenset[str]:
    """Every fact of a scenario that a condition may have as a term. first: the axes of a trainer, as `axis_texts`
    takes them."""
    return frozenset(_terms(scenario, first))


def _terms(scenario: Scenario, first: FirstValues) -> Iterator[str]:
    for axis, text in axis_texts(scenario, first).items():
        if axis in LEFT_OUT:
            continue
        if len(text) <= 60 and "\n" not in text:
            yield f"{axis}={text}"
        parts = text.split("/")
        yield from (
            f"{axis} has {part}" for part in (parts if len(parts) > 1 or axis in ("dtype", "optimizer") else ())
        )
    yield from (f"{name}>1" for name in MESH_AXES if getattr(scenario.mesh, name) > 1)
    yield from (f"program does {kind}" for kind in operations(scenario.program))
    if scenario.offload.fraction > 0:
        yield "offload>0"


def _plainness(term: str) -> tuple[int, int, str]:
    """The order among terms that exclude the same: an axis' whole value, then a part of it, then what follows from it;
    among those the order of the axes."""
    kind = 0 if "=" in term and " has " not in term else 1 if " has " in term else 2
    axis = term.replace(">", " ").replace("=", " ").split(" ")[0]
    return kind, AXES.index(axis) if axis in AXES else len(AXES), term


def _candidates(shared: Iterable[str], held: Sequence[frozenset[str]]) -> dict[str, int]:
    """For each axis setting shared by the failures, a bit mask of the passing scenarios without the setting. Settings
    whose mask adds no bit to another mask are dropped. held: the terms of each passing scenario."""
    excludes = {
        term: sum(1 << number for number, terms in enumerate(held) if term not in terms)
        for term in sorted(shared, key=_plainness)
    }
    kept: dict[str, int] = {}
    for term, mask in sorted(excludes.items(), key=lambda item: -item[1].bit_count()):
        if mask and not any(mask | other == other for other in kept.values()):
            kept[term] = mask
    return dict(list(kept.items())[:CANDIDATES])


def _fewest(excluded: dict[str, int]) -> list[str]:
    """The fewest terms that exclude what all together do, as far as `LONGEST` goes; the first of equally many."""
    everything = _joined(excluded.values())
    best: tuple[str, ...] = ()
    reached = 0
    for size in (1, 2, 3):
        for terms in combinations(excluded, size):
            mask = _joined(excluded[term] for term in terms)
            if mask == everything:
                return list(terms)
            if mask.bit_count() > reached:
                best, reached = terms, mask.bit_count()
    chosen = list(best)
    while len(chosen) < LONGEST and reached < everything.bit_count():
        so_far = _joined(excluded[term] for term in chosen)
        gains = {term: (so_far | mask).bit_count() for term, mask in excluded.items()}
        chosen.append(max(gains, key=gains.__getitem__))
        reached = gains[chosen[-1]]
    return chosen


def _joined(masks: Iterable[int]) -> int:
    joined = 0
    for mask in masks:
        joined |= mask
    return joined
