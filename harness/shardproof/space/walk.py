"""From a walk to its scenarios: exhaustive cells, covering rows on top of them, or a seeded sample.

What a system refuses is kept apart from what the space excludes. Covering rows are drawn from supported
scenarios only, so that no combination counts as covered by a scenario that never ran. Cells and pairs that only
refused scenarios contain are planned too: they run as `unsupported`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import prod
from operator import attrgetter, getitem
from typing import Any

import numpy as np

from shardproof.errors import UsageError
from shardproof.program import LOAD_AXES, changes
from shardproof.protocol.registry import system_named
from shardproof.scenario import Mesh, Scenario, parse_axis
from shardproof.space import kept
from shardproof.space.constraints import Table, constraints_of, constraints_of_load, tabulate
from shardproof.space.cost import cost_model
from shardproof.space.coverage import Counter, Coverage
from shardproof.space.covering import Cover, Rows
from shardproof.space.feasible import Axes, Bools, Factor, Feasible, factor
from shardproof.space.files import Walk
from shardproof.space.kept import Found
from shardproof.versions import CURED

ENUMERATION_LIMIT = 200_000


@dataclass(frozen=True)
class Walked:
    """What a walk came to. supported, refused: scenarios to run, and those that the system will call unsupported.

    * exclusions: the constraints that took something out.
    * cells: exhaustive combinations as (supported, refused, excluded).
    * valid: number of valid supported scenarios of the space.
    * coverages: as counted on `supported`.
    """

    walk: Walk
    supported: tuple[Scenario, ...]
    refused: tuple[Scenario, ...]
    exclusions: tuple[Table, ...]
    cells: tuple[int, int, int]
    valid: int
    coverages: tuple[Coverage, ...]


def follow(walk: Walk, seed: int = 0, sample: int | None = None) -> Walked:
    """The scenarios of a walk.

    Args:
        seed: of the random choices; the same seed gives the same scenarios.
        sample: draw this many supported scenarios at random instead of walking.

    Raises:
        UsageError: `strength = "all"` of a space too large to enumerate.
    """
    if not walk.axes:  # one scenario, as a walk over one value
        walk = replace(walk, axes={"program": (Scenario().program,)})
    problem = _Problem(walk)
    if sample is not None:
        return problem.walked(problem.sample(sample, seed), problem.nothing)
    digest = problem.digest(seed)
    found = kept.read(digest, problem.sizes)
    if found and problem.allows(found):
        return problem.recalled(found)
    every = walk.strength >= len(walk.axes)
    supported, refused = problem.enumerated() if every else problem.covering(seed), problem.refused_rows(seed)
    walked = problem.walked(supported, refused)
    kept.write(digest, Found(supported, refused, walked.cells, walked.valid, walked.coverages))
    return walked


def plain_sample(walked: Walked) -> Walked:
    """A few scenarios of a walk over a cured library, on the library as it is: together they have every value of every
    axis that the walk's have, so that a cure cannot hide that something else is broken without it."""
    cured = [scenario for scenario in walked.supported if scenario.version]
    masks = [0] * len(cured)
    bits = 0
    for axis in walked.walk.axes:
        values = list(map(attrgetter(axis), cured))
        bit = {value: 1 << bits + number for number, value in enumerate(dict.fromkeys(values))}
        bits += len(bit)
        masks = [mask | bit[value] for mask, value in zip(masks, values, strict=True)]
    left, chosen = (1 << bits) - 1, []
    while left:
        gains = [(mask & left).bit_count() for mask in masks]
        best = gains.index(max(gains))
        chosen.append(replace(cured[best], version=""))
        left &= ~masks[best]
    walk = replace(
        walked.walk,
        part=f"{walked.walk.part}/plain",
        version="",
        exhaustive=(),
        strength=1,
        three_way=(),
        budget_s=None,
        sample=True,
    )
    return Walked(walk, tuple(chosen), (), (), (0, 0, 0), walked.valid, ())


def once_each(walk: Walk, seed: int = 0) -> tuple[Scenario, ...]:
    """A few supported scenarios of a walk: every value of every axis that any supported scenario has occurs in one of
    them. They are the least that can say whether a library still takes all that the walk asks of it."""
    problem = _Problem(replace(walk, exhaustive=(), strength=1, three_way=()))
    return problem.scenarios(problem.covering(seed))


class _Problem:
    """A walk in numbers: axes by position, values by index, rules as factors."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.values: dict[str, list[Any]] = {
            axis: [parse_axis(axis, text) for text in texts] for axis, texts in walk.axes.items()
        }
        self.names = list(self.values)
        self.sizes = [len(values) for values in self.values.values()]
        self.base = Scenario(system=walk.system, version=walk.version)
        left_out = [(f"leave_out-{number}", rule.reason, rule.matches) for number, rule in enumerate(walk.leave_out)]
        accepts = system_named(walk.system).accepts
        constraints, limits = constraints_of(walk.system), accepts.limits
        if any(changes(self.base.with_axes({axis: text})) for axis in LOAD_AXES for text in walk.axes.get(axis, ())):
            constraints, limits = (*constraints, *constraints_of_load(walk.system)), (*limits, *accepts.load_limits)
        self.exclusions = tuple(self._tables([*((c.id, c.reason, c.excludes) for c in constraints), *left_out]))
        refusals = self._tables((limit.id, limit.reason, limit.refuses) for limit in limits)
        self._excluding = [self._factor(table) for table in self.exclusions]
        self._refusing = [self._factor(table) for table in refusals]
        self.nothing = np.empty((0, len(self.sizes)), np.int64)

    @cached_property
    def valid(self) -> Feasible:
        """What the space does not exclude."""
        return Feasible(self.sizes, self._excluding)

    @cached_property
    def supported(self) -> Feasible:
        """What of it the system does not refuse."""
        return Feasible(self.sizes, [*self._excluding, *self._refusing])

    def digest(self, seed: int) -> str:
        """The name under which it is kept what the walk comes to: of all that the methods below read."""
        costs = [(axis, cost.tolist()) for axis, cost in self._cost().items()]
        asked = (seed, self.names, self.sizes, self.exhaustive, self.walk.strength, self.walk.three_way, costs)
        return kept.digest_of((*asked, len(self._excluding)), [*self._excluding, *self._refusing])

    def walked(self, supported: Rows, refused: Rows) -> Walked:
        """What the walk came to, by the rows to run and those that the system will refuse."""
        scenarios = self.scenarios(supported)
        counts = (self.exclusions, self.cells, self.supported.count(), tuple(self.coverages(scenarios)))
        return Walked(self.walk, scenarios, self.scenarios(refused), *counts)

    def allows(self, found: Found) -> bool:
        """Whether every row that was kept is one that the tables of now allow."""
        return all(
            table.allowed[tuple(rows[:, axis] for axis in table.axes)].all()
            for rows, tables in (
                (found.supported, (*self._excluding, *self._refusing)), (found.refused, self._excluding)
            )
            for table in tables
        )  # fmt: skip

    def recalled(self, found: Found) -> Walked:
        """What the walk came to when it was last followed."""
        scenarios, refused = self.scenarios(found.supported), self.scenarios(found.refused)
        return Walked(self.walk, scenarios, refused, self.exclusions, found.cells, found.valid, found.coverages)

    @cached_property
    def exhaustive(self) -> Axes:
        return tuple(sorted(self.names.index(axis) for axis in self.walk.exhaustive if axis in self.values))

    @cached_property
    def _cell_tables(self) -> tuple[Bools, Bools]:
        """Which exhaustive cells hold a supported scenario, and which hold a valid but no supported one."""
        supported = self.supported.project(self.exhaustive)
        return supported, self.valid.project(self.exhaustive) & ~supported

    @property
    def cells(self) -> tuple[int, int, int]:
        if not self.exhaustive:
            return 0, 0, 0
        supported, refused = (int(np.count_nonzero(table)) for table in self._cell_tables)
        return supported, refused, prod(self.sizes[axis] for axis in self.exhaustive) - supported - refused

    def covering(self, seed: int) -> Rows:
        """Rows for every supported cell, and more until the demanded strength is reached."""
        cover = Cover(self.supported, self._demands(), seed, self._cost())
        if self.exhaustive:
            cover.start_from(self.exhaustive, np.argwhere(self._cell_tables[0]))
        cover.fill()
        return cover.rows

    def refused_rows(self, seed: int) -> Rows:
        """Rows for every cell, and every pair at most, that only refused scenarios contain."""
        demands = list(combinations(range(len(self.sizes)), min(2, len(self.sizes))))
        needless = dict(self.supported.projections(demands))
        cover = Cover(self.valid, demands, seed, self._cost(), needless)
        if self.exhaustive:
            cover.start_from(self.exhaustive, np.argwhere(self._cell_tables[1]))
        cover.fill()
        return cover.rows

    def enumerated(self) -> Rows:
        """Every supported row."""
        number = self.supported.count()
        if number > ENUMERATION_LIMIT or prod(self.sizes) > 500 * ENUMERATION_LIMIT:
            raise UsageError.of(
                f"strength all on {self.walk.system}",
                f"{number} scenarios",
                f"up to {ENUMERATION_LIMIT}",
                "--strength 2, or fewer values with --set model=dense --set program=resume",
            )
        return np.argwhere(self.supported.project(tuple(range(len(self.sizes)))))

    def sample(self, number: int, seed: int) -> Rows:
        """`number` different supported rows at random, or all of them where there are not more.

        Each has some chance; they are not equally likely, since axes are drawn one after the other.
        """
        number = min(number, self.supported.count())
        found: dict[tuple[int, ...], None] = {}
        for attempt in range(1000):
            if len(found) >= number:
                break
            draw = Cover(self.supported, (), seed + (attempt << 32))
            draw.start_from((), np.empty((2 * number, 0), np.int64))
            found.update(dict.fromkeys(map(tuple, draw.rows.tolist())))
        return np.array(list(found)[:number], np.int64).reshape(-1, len(self.sizes))

    def coverages(self, scenarios: tuple[Scenario, ...]) -> Iterator[Coverage]:
        """2-way and 3-way coverage of all axes, higher ones and `three_way` where the walk asks for them."""
        several = sum(size > 1 for size in self.sizes)
        counter = Counter(scenarios, self.values, self.supported)
        for strength in sorted({2, 3, self.walk.strength} - {1}):
            if strength <= several:
                yield counter.coverage(strength)
        three = [axis for axis in self.walk.three_way if axis in self.values]
        if len(three) >= 3 and self.walk.strength < 3:
            yield counter.coverage(3, three)

    def scenarios(self, rows: Rows) -> tuple[Scenario, ...]:
        columns = list(self.values.values())
        fixed = {"system": self.walk.system, "version": self.walk.version}
        found = [
            Scenario.of_checked({**fixed, **dict(zip(self.names, map(getitem, columns, row), strict=True))})
            for row in dict.fromkeys(map(tuple, rows.tolist()))
        ]
        if not self.walk.plain or self.walk.version != CURED:
            return tuple(found)
        return tuple(replace(s, version="") if any(rule.matches(s) for rule in self.walk.plain) else s for s in found)

    def _demands(self) -> list[Axes]:
        demands = set(combinations(range(len(self.sizes)), self.walk.strength))
        three = sorted(self.names.index(axis) for axis in self.walk.three_way if axis in self.values)
        return sorted(demands | (set(combinations(three, 3)) if self.walk.strength < 3 else set()))

    def _cost(self) -> dict[int, Any]:
        """Seconds of one session on each mesh: what makes one value of an axis dearer than another."""
        if "mesh" not in self.values:
            return {}
        model = cost_model()
        meshes: list[Mesh] = self.values["mesh"]
        seconds = [model.estimate_s(Scenario(system=self.walk.system, mesh=m, program="train")) for m in meshes]
        return {self.names.index("mesh"): np.array(seconds) / max(seconds)}

    def _tables(self, rules: Iterable[tuple[str, str, Any]]) -> Iterator[Table]:
        for rule_id, reason, refuses in rules:
            table = tabulate(rule_id, reason, refuses, self.base, self.values)
            if table:
                yield table

    def _factor(self, table: Table) -> Factor:
        return factor([self.names.index(axis) for axis in table.axes], table.allowed)
