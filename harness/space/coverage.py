"""How much of a space a list of scenarios covers: counted from the scenarios, whoever made the list.

*Verifies*: for every set of t axes, how many of the combinations that some supported scenario contains are in the
list, and that the list has no other. *Does not verify*: that the space's axes hold every value worth testing. It
shares no state with the generator; both know the feasible combinations from `feasible`, which is checked against
plain enumeration in tests/properties/test_covering.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import HarnessError
from harness.scenario import Scenario
from harness.space.feasible import Axes, Feasible


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


def coverage(
    scenarios: Sequence[Scenario],
    values: Mapping[str, Sequence[Any]],
    feasible: Feasible,
    strength: int,
    axes: Sequence[str] | None = None,
) -> Coverage:
    """Count the combinations of `strength` axes that occur in `scenarios`.

    Args:
        scenarios: complete and supported. values: typed values of every axis.
        feasible: of the axes in that order. axes: count combinations of these only; None = of all.

    Raises:
        HarnessError: a scenario holds a combination that is not feasible.
    """
    names = list(values)
    counted = [names.index(axis) for axis in (names if axes is None else axes)]
    columns = {axis: _column(scenarios, names[axis], values[names[axis]]) for axis in counted}
    subsets: list[Axes] = [tuple(sorted(subset)) for subset in combinations(counted, min(strength, len(counted)))]
    covered = there = 0
    for subset, table in feasible.projections(subsets):
        seen = np.zeros(table.shape, np.bool_)
        seen[tuple(columns[axis] for axis in subset)] = True
        if (seen & ~table).any():
            where = np.argwhere(seen & ~table)[0]
            found = [f"{names[a]}={values[names[a]][i]}" for a, i in zip(subset, where, strict=True)]
            raise HarnessError(f"a planned scenario holds an excluded combination: {' '.join(found)}")
        covered += int(np.count_nonzero(seen))
        there += int(np.count_nonzero(table))
    return Coverage(strength, tuple(names[a] for a in counted), covered, there)


def _column(scenarios: Sequence[Scenario], axis: str, values: Sequence[Any]) -> npt.NDArray[np.int64]:
    index = {value: i for i, value in enumerate(values)}
    return np.array([index[getattr(scenario, axis)] for scenario in scenarios], np.int64)
