"""Which scenarios the reference runs as a system under test, and that they pass."""

from __future__ import annotations

import pytest
from shardproof.laboratory.judge import ResolvedScenario, judge
from shardproof.scenario import Mesh, Scenario
from shardproof.space.constraints import constraints_of
from shardproof.systems.reference import SYSTEM

from tests.oracles import records_of

BASE = Scenario(checkpoint="sharded")

REFUSED = {
    "scaler-fp16-gradients": {"dtype": "fp16", "optimizer": "adamw/loss_scale=1024.0"},
    "fused-sgd-unfreeze": {"optimizer": "sgd/impl=fused", "program": "unfreeze", "model": "later"},
}


@pytest.mark.parametrize(
    ("axes", "lacks"),
    [
        ({"options": "one_bucket"}, "options"),
        ({"optimizer": "adamw/impl=multi_tensor"}, "FusedAdam is stepped under the rules of the systems that have it"),
        ({"sharding": "zero2"}, "zero2 reduces gradients to the same values as zero1"),
        ({"expert_parallel": "4", "mesh": "1x4x1"}, "expert_parallel"),
        ({"checkpoint": "dcp"}, "gathered, bucket_space, model_space, sharded"),
        ({"dtype": "bf16/exp_avg=fp32"}, "exp_avg"),
        ({"faults": "boundary.kill-rank"}, "boundary faults strike real ranks, and this system runs in lockstep"),
    ],
    ids=str,
)
def test_what_belongs_to_other_systems_is_left_to_them(axes: dict[str, str], lacks: str) -> None:
    assert lacks in str(SYSTEM.refusal(BASE.with_axes(axes)))


def test_each_limit_refuses_its_scenario_with_its_reason() -> None:
    assert [limit.id for limit in SYSTEM.accepts.own_limits] == list(REFUSED)
    for limit in SYSTEM.accepts.own_limits:
        assert SYSTEM.refusal(BASE.with_axes(REFUSED[limit.id])) == limit.reason


def test_bucket_space_checkpoints_are_for_buckets() -> None:
    (constraint,) = (found for found in SYSTEM.accepts.constraints if found.id == "bucket-sharding")
    per_parameter = BASE.with_axes({"checkpoint": "bucket_space"})
    assert [c.id for c in constraints_of(SYSTEM.name) if c.excludes(per_parameter)] == ["bucket-sharding"]
    assert not constraint.excludes(per_parameter.with_axes({"sharding": "zero1"}))


def test_replicated_and_linearly_scheduled_scenarios_run() -> None:
    asked = Scenario(checkpoint="gathered", sharding="replicate", mesh=Mesh(1, 3, 2)).with_axes(
        {"optimizer": "adamw/schedule=linear", "dtype": "bf16/reduce=fp32/master=fp32"}
    )
    assert SYSTEM.refusal(asked) is None
    found = judge(ResolvedScenario.from_scenario(asked), records_of(asked))
    assert (found.differences, found.distrust) == ((), "")
