"""Rules turned into tables: which ways a rule goes, what a fact spares, what is said of one that cannot be a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardproof.axes_read import explore
from shardproof.errors import HarnessError
from shardproof.oracle.contract import Contract
from shardproof.program import does, meshes, moves
from shardproof.protocol.registry import all_systems, system_named
from shardproof.scenario import STORAGE_DTYPES, DTypePolicy, Mesh, Scenario
from shardproof.space.constraints import TABLE_LIMIT, constraints_of, tabulate

Rule = Callable[[Scenario], object]

VALUES: dict[str, list[Any]] = {
    "mesh": [Mesh(), Mesh(1, 2, 1), Mesh(2, 2, 1), Mesh(1, 1, 2)],
    "dtype": [DTypePolicy(), DTypePolicy("bf16"), DTypePolicy("bf16", reduce="fp32")],
    "program": ["resume", "train", "rollback"],
    "load": ["same", "grow", "tp_change"],
    "microbatches": [1, 2],
}


def ways(rule: Rule, values: Mapping[str, Sequence[Any]] = VALUES) -> list[tuple[dict[str, list[int]], object]]:
    return list(explore(rule, Scenario(), values))


def test_a_rule_runs_once_for_each_way_that_it_goes() -> None:
    found = ways(lambda s: s.microbatches == 1 and s.load == "grow")
    assert found == [
        ({"microbatches": [0], "load": [0]}, False),
        ({"microbatches": [0], "load": [1]}, True),
        ({"microbatches": [0], "load": [2]}, False),
        ({"microbatches": [1]}, False),
    ]


def test_axes_that_are_read_in_one_way_only_are_not_crossed_with_the_others() -> None:
    def rule(s: Scenario) -> bool:
        return s.load == "grow" if s.microbatches == 1 else s.program == "train"

    assert len(ways(rule)) == len(VALUES["load"]) + len(VALUES["program"])
    table = tabulate("rule", "why", rule, Scenario(), VALUES)
    assert table is not None
    assert table.axes == ("program", "load", "microbatches")


def test_a_fact_puts_values_of_the_same_answer_into_one_way() -> None:
    found = ways(lambda s: s.fact("mesh", lambda mesh: mesh.tp) > 1)
    assert found == [({"mesh": [0, 1, 2]}, False), ({"mesh": [3]}, True)]


def test_a_fact_and_the_value_of_one_axis_can_both_be_asked_for() -> None:
    def rule(s: Scenario) -> bool:
        return s.fact("mesh", lambda mesh: mesh.tp) == 1 and s.mesh == Mesh(1, 2, 1)

    assert [chosen["mesh"] for chosen, found in ways(rule) if found] == [[1]]
    assert [chosen["mesh"] for chosen, found in ways(rule) if not found] == [[0], [2], [3]]


def test_an_axis_that_the_space_lacks_is_that_of_the_base() -> None:
    base = Scenario(seed=7)
    assert list(explore(lambda s: (s.seed, s.fact("seed", lambda seed: seed + 1)), base, VALUES)) == [({}, (7, 8))]


def test_meshes_look_at_the_load_relation_of_programs_that_move_only() -> None:
    found = ways(lambda s: meshes(s) and None)
    moving = len(VALUES["mesh"]) * len(VALUES["load"])
    assert len(found) == moving + len(VALUES["mesh"])
    assert {tuple(chosen["program"]) for chosen, _ in found} == {(0,), (1, 2)}


def test_facts_of_a_plain_scenario_are_those_of_its_values() -> None:
    scenario = Scenario(program="build step save load step")
    assert does(scenario, "save", "overflow")
    assert not does(scenario, "overflow")
    assert not moves(scenario)
    assert moves(Scenario(program="restart"))


def test_a_rule_that_raises_is_named_with_the_values_on_which_it_does() -> None:
    def rule(s: Scenario) -> bool:
        return {"same": False, "grow": True}[s.load] if s.microbatches == 2 else False

    with pytest.raises(HarnessError) as caught:
        tabulate("half", "why", rule, Scenario(), VALUES)
    assert str(caught.value) == (
        "rule 'half' of reference: a rule raises KeyError: 'tp_change', on microbatches=2 load=tp_change"
    )


def test_a_rule_that_depends_on_something_else_is_refused() -> None:
    runs: list[None] = []

    def rule(s: Scenario) -> bool:
        runs.append(None)
        return bool(s.load if len(runs) == 1 else s.program)

    with pytest.raises(HarnessError, match="read load the first time and program the second"):
        ways(rule)


def test_a_rule_of_too_many_axes_is_refused_before_its_table_is_made() -> None:
    values = {**VALUES, "seed": list(range(TABLE_LIMIT // 2))}
    with pytest.raises(HarnessError, match="rule 'wide' of reference: it reads load, seed at once; split it"):
        tabulate("wide", "why", lambda s: s.load == "grow" and s.seed < 0, Scenario(), values)


def test_a_contract_that_remembers_by_axes_can_be_asked_by_a_rule() -> None:
    contract = Contract()
    small = {"model": ["dense", "tied"], "dtype": VALUES["dtype"], "load": VALUES["load"]}

    def rule(s: Scenario) -> bool:
        return contract.parameters(s, Mesh())[0].stages.storage == "bf16" and s.load == "grow"

    tables = [tabulate("rule", "why", rule, Scenario(), small) for _ in range(2)]  # the second time remembered
    for table in tables:
        assert table is not None
        assert {"dtype", "load"} <= set(table.axes)
        assert table.excluded * len(small["load"]) == table.allowed.size * 2 // 3


@pytest.mark.parametrize("name", [system.name for system in all_systems()])
def test_rules_answer_for_values_that_their_system_refuses(name: str) -> None:
    """Each rule is put into a table of its own, so that it is asked about what another one refuses. What a table says
    of a combination is what the rule says of that scenario."""
    system = system_named(name)
    models = [spec.name for spec in system.models][:2]
    values = {
        "model": ["dense", "tied", *models],
        "dtype": [DTypePolicy(storage) for storage in STORAGE_DTYPES],
        "mesh": VALUES["mesh"],
        "sharding": ["fully_shard", "zero2"],
        "checkpoint": ["dcp", system.accepts.plainest_checkpoint, "unheard_of"],
        "options": [(), ("unheard_of",), *((word,) for word in system.accepts.options)],
    }
    distinct = {axis: list(dict.fromkeys(each)) for axis, each in values.items()}
    rules = [(each.id, each.refuses) for each in system.accepts.limits]
    rules += [(each.id, each.excludes) for each in constraints_of(name)]
    draw = Random(name)
    drawn = [{axis: draw.randrange(len(each)) for axis, each in distinct.items()} for _ in range(20)]
    base = Scenario(system=name)
    for rule_id, rule in rules:
        table = tabulate(rule_id, "", rule, base, distinct)
        for places in drawn:
            scenario = replace(base, **{axis: distinct[axis][place] for axis, place in places.items()})
            excluded = table is not None and not table.allowed[tuple(places[axis] for axis in table.axes)]
            assert excluded == (rule(scenario) not in (None, False)), f"{rule_id}: {scenario}"


READS: dict[str, Callable[[Scenario], Any]] = {
    "load": lambda s: s.load,
    "dtype": lambda s: s.dtype,
    "microbatches": lambda s: s.microbatches,
    "tp": lambda s: s.fact("mesh", lambda mesh: mesh.tp),
    "world": lambda s: s.mesh.world,
    "storage": lambda s: s.fact("dtype", lambda policy: policy.storage),
    "moves": moves,
    "saves": lambda s: does(s, "save"),
    "meshes": meshes,
}


@st.composite
def rules(draw: st.DrawFn, depth: int = 3) -> Rule:
    """A random rule: it reads something, and what it reads or answers next depends on that."""
    read = READS[draw(st.sampled_from(sorted(READS)))]
    if depth == 0:
        modulus = draw(st.integers(2, 3))
        return lambda s: len(str(read(s))) % modulus == 0
    first, second = draw(rules(depth=depth - 1)), draw(rules(depth=depth - 1))
    return lambda s: (first if len(str(read(s))) % 2 else second)(s)


@given(rules(), st.lists(st.sampled_from(sorted(VALUES)), unique=True, min_size=1))
def test_a_table_is_that_of_asking_the_rule_about_every_scenario(rule: Rule, axes: list[str]) -> None:
    values = {axis: VALUES[axis] for axis in axes}
    table = tabulate("rule", "why", rule, Scenario(), values)
    for index in product(*(range(len(v)) for v in values.values())):
        chosen = {axis: values[axis][i] for axis, i in zip(values, index, strict=True)}
        allowed = table is None or table.allowed[tuple(values[a].index(chosen[a]) for a in table.axes)]
        assert allowed == (not rule(Scenario(**chosen)))


@given(rules(), st.lists(st.sampled_from(sorted(VALUES)), unique=True, min_size=1))
def test_ways_share_no_scenario_and_leave_none_out(rule: Rule, axes: list[str]) -> None:
    values = {axis: VALUES[axis] for axis in axes}
    found = ways(rule, values)
    for index in product(*(range(len(v)) for v in values.values())):
        place = dict(zip(values, index, strict=True))
        assert sum(all(place[axis] in left for axis, left in chosen.items()) for chosen, _ in found) == 1
