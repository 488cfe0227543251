"""How much of a space a list of scenarios covers: counted from the scenarios, whoever made the list.

*Verifies*: for every set of t axes, how many of the combinations that some supported scenario contains are in the
list, and that the list has no other. *Does not verify*: that the space's axes hold every value worth testing. It
shares nothing with the generator but what is feasible, and `feasible` is checked against plain enumeration in
tests/properties/test_covering.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shardproof.errors import HarnessError
from shardproof.scenario import Scenario
from shardproof.space.feasible import Axes, Bools, Feasible


@dataclass(frozen=True)
class Coverage:
    """t-way coverage: of `feasible` combinations of `strength` axes, `covered` appear. axes: which were counted."""

    strength: int
    axes: tuple[str, ...]
    covered: int
    feasible: int

    @property
    def complete(self) -> bool:
        return self.covered == self.feasible


class Counter:
    """Counts coverage of one list of scenarios.

    Args:
        scenarios: complete and supported. values: typed values of every axis. feasible: of the axes in that order.
    """

    def __init__(self, scenarios: Sequence[Scenario], values: Mapping[str, Sequence[Any]], feasible: Feasible) -> None:
        self._values, self._feasible = values, feasible
        self._names = list(values)
        self._columns = [_column(scenarios, axis, options) for axis, options in values.items()]

    def coverage(self, strength: int, axes: Sequence[str] | None = None) -> Coverage:
        """Count the combinations of `strength` axes that occur in the scenarios: of these axes only; None = of all.

        Raises:
            HarnessError: a scenario holds a combination that is not feasible.
        """
        counted = [self._names.index(axis) for axis in (self._names if axes is None else axes)]
        subsets: list[Axes] = [tuple(sorted(subset)) for subset in combinations(counted, min(strength, len(counted)))]
        covered = there = 0
        for subset, table in self._feasible.projections(subsets):
            seen = self._seen(subset, table.shape)
            if np.greater(seen, table).any():
                self._refuse(subset, seen & ~table)
            covered += int(np.count_nonzero(seen))
            there += int(np.count_nonzero(table))
        return Coverage(strength, tuple(self._names[a] for a in counted), covered, there)

    def _seen(self, subset: Axes, shape: tuple[int, ...]) -> Bools:
        """Which combinations of some axes occur, as a table of this shape."""
        place = self._columns[subset[0]]
        for axis, size in zip(subset[1:], shape[1:], strict=True):
            place = place * size + self._columns[axis]
        seen = np.zeros(prod(shape), np.bool_)
        seen[place] = True
        return seen.reshape(shape)

    def _refuse(self, subset: Axes, wrong: Bools) -> NoReturn:
        texts = [f"{self._names[axis]}={self._values[self._names[axis]][i]}"
                 for axis, i in zip(subset, np.argwhere(wrong)[0], strict=True)]  # fmt: skip
        raise HarnessError(f"a planned scenario holds an excluded combination: {' '.join(texts)}")


def _column(scenarios: Sequence[Scenario], axis: str, values: Sequence[Any]) -> npt.NDArray[np.int64]:
    """The index of each scenario's value of an axis. Values that are many times the same object are looked up once."""
    found = [getattr(scenario, axis) for scenario in scenarios]
    index = {value: i for i, value in enumerate(values)}
    places = {key: index[value] for key, value in dict(zip(map(id, found), found, strict=True)).items()}
    return np.array([places[key] for key in map(id, found)], np.int64)
