"""Scenarios survive TOML, differ where their fields differ, and keep ids apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from shardproof.models import ZOO
from shardproof.program import PROGRAMS
from shardproof.scenario import (
    FLOAT_DTYPES,
    LOAD_RELATIONS,
    OPTIMIZER_IMPLEMENTATIONS,
    OPTIMIZER_KINDS,
    DTypePolicy,
    Mesh,
    Offload,
    Optimizer,
    Scenario,
)

sizes = st.integers(1, 8)
meshes = st.builds(Mesh, sizes, sizes, sizes)
stage = st.none() | st.sampled_from(FLOAT_DTYPES)
policies = st.builds(DTypePolicy, st.sampled_from((*FLOAT_DTYPES, "mixed")), stage, stage, stage, stage)
rates = st.floats(0, 1, allow_subnormal=True)
decays = st.floats(0, 1, exclude_max=True, allow_subnormal=True)
optimizers = st.builds(
    Optimizer,
    kind=st.sampled_from(OPTIMIZER_KINDS),
    impl=st.sampled_from(OPTIMIZER_IMPLEMENTATIONS),
    lr=rates,
    weight_decay=rates,
    beta1=decays,
    beta2=decays,
    eps=rates,
    momentum=st.floats(0.001, 1),
    nesterov=st.booleans(),
    groups=st.sampled_from(("model", "one")),
    clip=rates,
    loss_scale=st.just(0.0) | st.integers(0, 24).map(lambda k: 2.0**k),
    schedule=st.sampled_from(("none", "halve")),
)
names = st.text("abcdefghijklmnopqrstuvwxyz-_.0123456789", min_size=1)
scenarios = st.builds(
    Scenario,
    system=names,
    version=st.just("") | names,
    model=st.sampled_from(sorted(ZOO)),
    dtype=policies,
    mesh=meshes,
    load=st.sampled_from(LOAD_RELATIONS) | meshes.map(str),
    load_options=st.none() | st.sets(st.sampled_from(("overlap", "round_robin"))).map(sorted).map(tuple),
    sharding=st.sampled_from(("fully_shard", "zero1")),
    reshard_after_forward=st.sampled_from(("true", "false", "none", "2", "3")),
    offload=st.builds(Offload, rates),
    optimizer=optimizers,
    microbatches=st.integers(1, 3),
    grad_sync=st.sampled_from(("last", "every")),
    checkpoint=names,
    program=st.sampled_from((*PROGRAMS, "build step save load step")),
    faults=st.lists(names, max_size=3, unique=True).map(tuple),
    seed=st.integers(0, 2**31),
)


@given(scenarios, st.text(max_size=20))
def test_toml_round_trip(scenario: Scenario, title: str) -> None:
    back = Scenario.from_toml(scenario.to_toml(title))
    assert back == scenario
    assert hash(back) == hash(scenario)
    assert back.id == scenario.id


@given(scenarios)
def test_axis_values_round_trip(scenario: Scenario) -> None:
    assert Scenario().with_axes(scenario.axis_values()) == scenario
    assert Scenario().with_axes(scenario.axis_values(only_changed=True)) == scenario


@given(scenarios, scenarios)
def test_ids_are_equal_exactly_for_equal_scenarios(first: Scenario, second: Scenario) -> None:
    assert (first.id == second.id) == (first == second)


@given(scenarios, st.sampled_from(sorted(Scenario().axis_values())))
def test_putting_one_axis_back_to_its_default_changes_the_id_only_if_it_differed(scenario: Scenario, axis: str) -> None:
    reset = scenario.with_axes({axis: Scenario().axis_values()[axis]})
    assert (reset.id == scenario.id) == (getattr(scenario, axis) == getattr(Scenario(), axis))
