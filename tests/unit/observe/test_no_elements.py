"""Parameters without an element, and without a dim: they are held, written and loaded like any other, and one that is
not there is missing. That they have no bytes makes nothing equal."""

from __future__ import annotations

import pytest
from shardproof.diff import LAZY_STATE, diff
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Logical
from shardproof.observe.record import LIVE, WRITTEN, Record
from shardproof.oracle import twin
from shardproof.program import expand
from shardproof.protocol.registry import contract_of
from shardproof.readers.stored import TorchStored
from shardproof.reference.system import run
from shardproof.scenario import Scenario

FORMATS = ["fully_shard sharded", "fully_shard gathered", "zero1 bucket_space", "zero1 model_space", "zero1 sharded"]


def scenario_of(kind: str, model: str) -> Scenario:
    sharding, checkpoint = kind.split()
    axes = {"model": model, "sharding": sharding, "checkpoint": checkpoint, "dtype": "mixed", "mesh": "1x3x2"}
    return Scenario(program="build step save build step load step").with_axes(axes)


def expected_and_records(scenario: Scenario) -> tuple[Logical, list[Record]]:
    inputs, placement = contract_of(scenario).resolve(scenario)
    must = twin.run(inputs)
    for op in expand(scenario):
        if op.kind == "save":
            live = {key: value for key, value in must.items() if key.op == op.index}
            must = must | TorchStored().must_hold(live, op, scenario)
    return must, run(inputs, placement)


@pytest.mark.parametrize("model", ["hollow", "scalars"])
@pytest.mark.parametrize("kind", FORMATS)
def test_twin_and_reference_hold_and_write_them_alike(kind: str, model: str) -> None:
    must, records = expected_and_records(scenario_of(kind, model))
    observed, problems = assemble(records)
    assert diff(must, observed, problems) == []
    there = {(key.where, key.role): value.shape for key, value in observed.items() if key.fqn == "b.weight"}
    if model == "hollow":
        assert there.keys() >= {
            (where, role) for where in (LIVE, WRITTEN) for role in ("param", "exp_avg", "exp_avg_sq")
        }
        assert {shape for (_, role), shape in there.items() if role != "step"} == {(0, 4)}


@pytest.mark.parametrize("role", ["param", "exp_avg", "grad", "compute_param"])
def test_one_that_is_gone_or_another_is_a_difference(role: str) -> None:
    must, records = expected_and_records(scenario_of("zero1 sharded", "hollow"))
    own = [record for record in records if record.fqn == "b.weight" and record.role == role]
    rest = [record for record in records if record not in own]
    assert own
    for kind, others in (
        ("missing", []),
        ("shape", [record._replace(shape=(0,), start=(0,), size=(0,)) for record in own]),
        ("dtype", [record._replace(dtype="bf16") for record in own]),
    ):
        observed, problems = assemble(rest + others)
        found = diff(must, observed, problems, [LAZY_STATE])
        assert {(d.kind, d.fails) for d in found} == {(kind, True)}
        assert {(d.key.role, d.key.fqn) for d in found} == {(role, "b.weight")}
