"""What a walk over Megatron-Core leaves out because there is no single right answer; systems over it share it."""

from __future__ import annotations

import pytest
from shardproof.scenario import Scenario
from shardproof.space.constraints import constraints_of, impossible
from shardproof.systems import megatron_bridge
from shardproof.systems.megatron_core import SYSTEM

ZERO1 = {"system": "megatron-core", "sharding": "zero1", "optimizer": "adamw/impl=multi_tensor"}
AWARE = {**ZERO1, "options": "precision_aware"}
OFFLOADED = {**ZERO1, "offload": "cpu=0.5"}

RESUMED = {**ZERO1, "dtype": "bf16/master=fp32", "program": "resume"}

EXCLUDED = [
    ("load-version-older", {**RESUMED, "version": "git:main", "load_version": "newest"}),
    ("load-version-older", {**RESUMED, "version": "path:.+cured", "load_version": "0.16.1"}),
    ("load-version-older", {**RESUMED, "version": "0.16.1", "load_version": "0.15.3"}),
    ("multi-tensor-half", {**ZERO1, "dtype": "bf16"}),
    ("precision-aware-dtypes", {**ZERO1, "dtype": "bf16/master=fp32/exp_avg=bf16"}),
    ("precision-aware-gradient", {**AWARE, "dtype": "bf16/master=fp32/grad=fp32"}),
    ("precision-aware-gradient", {**AWARE, "dtype": "mixed/master=fp32/grad=bf16"}),
    ("precision-aware-offload", {**AWARE, "dtype": "bf16/master=fp32/exp_avg=bf16", "offload": "cpu"}),
    ("offload-groups", {**OFFLOADED, "model": "groups"}),
    ("offload-experts", {**OFFLOADED, "model": "moe", "expert_parallel": "2", "mesh": "1x2x1"}),
]


@pytest.mark.parametrize(("constraint", "axes"), EXCLUDED)
def test_each_constraint_excludes_its_example(constraint: str, axes: dict[str, str]) -> None:
    scenario = Scenario().with_axes(axes)
    assert [c.id for c in constraints_of(SYSTEM.name) if c.excludes(scenario)][:1] == [constraint]


def test_every_constraint_has_an_example() -> None:
    for system in (SYSTEM, megatron_bridge.SYSTEM):
        assert {name for name, _ in EXCLUDED} == {c.id for c in system.accepts.constraints}


@pytest.mark.parametrize(
    "axes",
    [
        {**AWARE, "dtype": "mixed/reduce=fp32/master=fp32/exp_avg=bf16/exp_avg_sq=bf16"},
        {**OFFLOADED, "model": "groups", "options": "torch_offload"},
        {**OFFLOADED, "model": "groups", "optimizer": "adamw/impl=multi_tensor/groups=one"},
        {**ZERO1, "dtype": "bf16/master=fp32"},
        {**RESUMED, "version": "0.15.3", "load_version": "newest"},
        {**RESUMED, "version": "0.15.3", "load_version": "0.16.1"},
    ],
)
def test_sound_scenarios_are_left_in(axes: dict[str, str]) -> None:
    scenario = Scenario().with_axes({"checkpoint": "dp_zero", **axes})
    assert impossible(scenario) is None
    assert not [c.id for c in constraints_of(SYSTEM.name) if c.excludes(scenario)]
