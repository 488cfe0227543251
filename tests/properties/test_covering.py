"""Feasibility and covering arrays against enumeration of small spaces, tabulation against the rules themselves."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardproof.errors import HarnessError
from shardproof.scenario import Mesh, Scenario
from shardproof.space.constraints import tabulate
from shardproof.space.coverage import Counter
from shardproof.space.covering import Cover
from shardproof.space.feasible import Factor, Feasible, factor

from tests.effort import examples


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Factor]]:
    """Two to five axes of one to four values under up to five tables over none to three axes, most entries allowed.
    A table over no axis is what is left of a rule of which the space fixes every axis."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    factors = []
    for _ in range(draw(st.integers(0, 5))):
        number = min(len(sizes), draw(st.integers(0, 3)))
        axes = draw(st.permutations(range(len(sizes))))[:number]
        shape = [sizes[a] for a in axes]
        odds = st.sampled_from([True, True, True, False])
        flat = draw(st.lists(odds, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        factors.append(factor(axes, np.array(flat).reshape(shape)))
    return sizes, factors


def allowed_rows(sizes: list[int], factors: list[Factor]) -> list[tuple[int, ...]]:
    every = product(*(range(size) for size in sizes))
    return [row for row in every if all(f.allowed[tuple(row[a] for a in f.axes)] for f in factors)]


@given(problems(), st.integers(1, 3))
def test_feasible_combinations_are_those_of_the_enumerated_rows(problem: Any, strength: int) -> None:
    sizes, factors = problem
    rows = allowed_rows(sizes, factors)
    subsets = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    feasible = Feasible(sizes, factors)
    found = dict(feasible.projections(subsets))
    assert set(found) == set(subsets)
    for subset, table in found.items():
        assert {tuple(map(int, cell)) for cell in np.argwhere(table)} == {tuple(row[a] for a in subset) for row in rows}
        assert (feasible.project(subset) == table).all()


@given(problems())
def test_count_is_the_number_of_enumerated_rows(problem: Any) -> None:
    assert Feasible(*problem).count() == len(allowed_rows(*problem))


@given(problems(), st.integers(1, 3), st.integers(0, 3))
def test_a_covering_array_holds_every_feasible_combination_and_only_allowed_rows(
    problem: Any, strength: int, seed: int
) -> None:
    sizes, factors = problem
    rows = allowed_rows(sizes, factors)
    subsets = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    feasible = Feasible(sizes, factors)
    cover = Cover(feasible, subsets, seed)
    cells = np.argwhere(feasible.project((0, 1)))
    cover.start_from((0, 1), cells)
    cover.fill()
    made = {tuple(row) for row in cover.rows.tolist()}
    assert made <= set(rows)
    for subset in [*subsets, (0, 1)]:
        assert {tuple(row[a] for a in subset) for row in made} == {tuple(row[a] for a in subset) for row in rows}


@given(problems())
def test_buckets_never_lead_into_a_dead_end(problem: Any) -> None:
    sizes, factors = problem
    rows = set(allowed_rows(sizes, factors))
    feasible = Feasible(sizes, factors)
    partial: list[dict[int, int]] = [{0: i} for i in np.flatnonzero(feasible.project((0,))).tolist()]
    for axis, tables in feasible.buckets((0,)):
        grown = []
        for row in partial:
            choices = [
                {**row, axis: value}
                for value in range(sizes[axis])
                if all(t.allowed[tuple(feasible.classes[a][{**row, axis: value}[a]] for a in t.axes)] for t in tables)
            ]
            assert choices
            grown += choices
        partial = grown
    assert {tuple(row[a] for a in range(len(sizes))) for row in partial} == rows


RULES = [
    lambda s: s.mesh.world > 4,
    lambda s: s.microbatches == 1 and s.grad_sync == "every",
    lambda s: s.model == "tied" or (s.seed > 1 and s.mesh.tp > 1),
    lambda s: "reason" if s.load == "grow" and s.mesh.dp_shard == 2 else None,
    lambda s: False,
]
VALUES: dict[str, list[Any]] = {
    "mesh": [Mesh(), Mesh(1, 2, 1), Mesh(2, 2, 2)],
    "microbatches": [1, 2],
    "grad_sync": ["last", "every"],
    "model": ["dense", "tied"],
    "seed": [0, 1, 2],
    "load": ["same", "grow"],
}
LENGTHS = [len(values) for values in VALUES.values()]


@pytest.mark.parametrize("number", range(len(RULES)))
def test_a_table_says_what_its_rule_says(number: int) -> None:
    rule = RULES[number]
    table = tabulate("rule", "reason", rule, Scenario(), VALUES)
    for row in product(*VALUES.values()):
        chosen = dict(zip(VALUES, row, strict=True))
        excluded = rule(Scenario(**chosen)) not in (None, False)
        if table is None:
            assert not excluded
        else:
            index = tuple(VALUES[axis].index(chosen[axis]) for axis in table.axes)
            assert table.allowed[index] == (not excluded)


def test_a_table_reads_only_the_axes_it_needs() -> None:
    table = tabulate("rule", "reason", RULES[1], Scenario(), VALUES)
    assert table is not None
    assert table.axes == ("microbatches", "grad_sync")
    assert table.excluded == 1


def test_a_rule_of_too_many_axes_is_refused() -> None:
    values = {**VALUES, "seed": list(range(200_001))}
    with pytest.raises(HarnessError, match="split it into rules of fewer axes"):
        tabulate("rule", "reason", lambda s: s.seed + len(s.load) < 0, Scenario(), values)


@settings(max_examples=examples(10))
@given(st.lists(st.tuples(*(st.sampled_from(v) for v in VALUES.values())), min_size=1, max_size=20), st.integers(1, 3))
def test_coverage_counts_what_sets_of_tuples_count(rows: list[tuple[Any, ...]], strength: int) -> None:
    scenarios = [Scenario(**dict(zip(VALUES, row, strict=True))) for row in rows]
    found = Counter(scenarios, VALUES, Feasible(LENGTHS, [])).coverage(strength)
    subsets = list(combinations(range(len(VALUES)), strength))
    assert found.covered == sum(len({tuple(row[a] for a in subset) for row in rows}) for subset in subsets)
    assert found.feasible == sum(int(np.prod([LENGTHS[a] for a in subset])) for subset in subsets)


def test_coverage_refuses_an_excluded_combination() -> None:
    never = factor([0], np.array([True, True, False]))
    with pytest.raises(HarnessError, match="excluded combination: mesh=2x2x2"):
        Counter([Scenario(mesh=Mesh(2, 2, 2))], VALUES, Feasible(LENGTHS, [never])).coverage(1)
