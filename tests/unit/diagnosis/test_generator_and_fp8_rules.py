"""Random generators and fp8 weights of the reference: what ranks hold is what their oracle predicts, and what the rules
say of a planted mistake.

*Verifies*: streams and weights over meshes, loads and programs; that a rule is silent where one element is otherwise.
*Does not verify*: that a library's generators are like these.
"""

from __future__ import annotations

import os

os.environ["ATEN_CPU_CAPABILITY"] = "default"  # read by torch when its first kernel runs

from dataclasses import replace

import numpy as np
import pytest
from shardproof.diagnosis.refusals import explain_refusal
from shardproof.diagnosis.rules.engine import explain
from shardproof.diff import diff
from shardproof.laboratory.judge import ResolvedScenario, run_reference
from shardproof.observe.logical import Key, Logical
from shardproof.observe.record import LIVE, WRITTEN
from shardproof.protocol.registry import contract_of
from shardproof.reference.quantised import FP8, quantise, scales_for
from shardproof.reference.streams import collected, coordinates, fresh, handed_out, seed_of
from shardproof.scenario import Mesh, Scenario
from shardproof.systems.reference.generators_and_fp8 import beside

from tests.oracles import by_reference, by_twin
from tests.unit.diagnosis.test_diagnosis import context_of

pytestmark = pytest.mark.usefixtures("explained_word_for_word")

PROGRAMS = ("resume", "rollback", "model_only", "recall", "accumulation", "overflow", "previous", "optimizer_only")
MESHES = (("1x2x2", "same"), ("1x2x2", "tp_change"), ("2x2x1", "grow"), ("1x4x1", "indivisible"))
KINDS = (
    ("fully_shard", "fp32/param=bf16/reduce=fp32", "sharded"),
    ("zero1", "bf16/reduce=fp32/master=fp32", "bucket_space"),
)


def scenario_of(model: str, program: str, mesh: str, load: str, number: int) -> Scenario:
    sharding, dtype, checkpoint = KINDS[number % len(KINDS)]
    axes = {"model": model, "program": program, "mesh": mesh, "load": load, "sharding": sharding, "dtype": dtype}
    optimizer = "adamw/loss_scale=1024.0" if program == "overflow" else "adamw"
    ep = "2" if model == "dropout" and load != "indivisible" else "1"
    return Scenario.from_axes(
        {**axes, "checkpoint": checkpoint, "optimizer": optimizer, "microbatches": "2", "expert_parallel": ep}
    )


@pytest.mark.parametrize("model", ["dropout", "quantised"])
@pytest.mark.parametrize(("number", "program"), list(enumerate(PROGRAMS)))
def test_what_ranks_hold_is_what_the_oracle_says(model: str, number: int, program: str) -> None:
    mesh, load = MESHES[number % len(MESHES)]
    found, _, _ = run_reference(ResolvedScenario.from_scenario(scenario_of(model, program, mesh, load, number)))
    assert (found.differences, found.distrust) == ((), "")


def test_every_coordinate_has_a_stream_of_its_own() -> None:
    mesh = Mesh(2, 2, 2)
    places = {stream: set(coordinates(stream, mesh, 2)) for stream in ("replicated", "tensor", "expert", "data")}
    assert {stream: len(places[stream]) for stream in places} == {"replicated": 1, "tensor": 2, "expert": 4, "data": 4}
    for stream, own in places.items():
        assert len({seed_of(stream, 7, place, mesh.tp) for place in own}) == len(own)


def test_a_stream_of_another_number_of_coordinates_stays_as_it_was_seeded() -> None:
    states = np.array([[1, 2], [3, 4]])
    saved = collected(states, [0, 1])
    assert handed_out(np.zeros((4, 2)), saved, [0, 1, 0, 1]).tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
    assert handed_out(np.zeros((2, 2)), saved, [0, 0]).tolist() == [[0, 0], [0, 0]]


def test_a_model_without_dropout_has_no_streams() -> None:
    from shardproof.models import model_spec

    assert fresh(model_spec("dense"), Mesh(), 1, 0) == {}


def test_the_greatest_magnitude_is_the_greatest_number_of_fp8() -> None:
    values = np.array([-0.5, 0.25, 0.0], np.float32)
    scale = scales_for(np.float32([0.5]))
    assert quantise(values, scale).astype(np.float32).tolist() == [-448.0, 224.0, 0.0]
    assert quantise(values * 4, scale).dtype == FP8
    assert scales_for(np.float32([0.0, np.inf, np.nan])).tolist() == [1.0, 1.0, 1.0]


def judged(fault: str, **axes: str) -> tuple[Logical, Logical, Scenario]:
    """What must be, and what ranks held with a fault."""
    clean = Scenario.from_axes(axes)
    truth = beside(by_twin(clean), clean, contract_of(clean))
    return truth, by_reference(replace(clean, faults=(fault,))), clean


@pytest.mark.parametrize(
    ("fault", "axes", "mechanism", "role"),
    [
        ("streams-taken-for-copies",
         {"model": "dropout", "mesh": "1x2x1", "expert_parallel": "2", "program": "restart", "checkpoint": "sharded"},
         "stream_of_another_rank", "rng"),
        ("scale-of-the-shard-group", {"model": "quantised", "mesh": "1x1x2", "program": "train"},
         "scale_of_a_part", "quant_scale"),
        ("requantised-by-a-load",
         {"model": "quantised", "mesh": "1x2x1", "program": "rollback", "checkpoint": "sharded"},
         "quantised_twice", "quantised"),
    ],
)  # fmt: skip
def test_a_rule_speaks_and_is_silent_where_one_element_is_otherwise(
    fault: str, axes: dict[str, str], mechanism: str, role: str
) -> None:
    expected, observed, clean = judged(fault, **axes)
    live = {key: value for key, value in expected.items() if key.where == LIVE}

    def said(seen: Logical) -> set[str]:
        differences = [d for d in diff(live, seen) if d.key.role == role]
        assert differences
        return {e.mechanism for e in explain(differences, context_of(live, seen, clean))}

    assert mechanism in said(observed)
    spoilt = {
        key: value._replace(data=bytes([value.data[0] ^ 1, *value.data[1:]])) if key.role == role else value
        for key, value in observed.items()
    }
    assert mechanism not in said(spoilt)


def test_what_a_save_writes_is_predicted() -> None:
    scenario = Scenario.from_axes({"model": "quantised", "checkpoint": "sharded"})
    truth = beside(by_twin(scenario), scenario, contract_of(scenario))
    written = {key.fqn for key in truth if key.where == WRITTEN}
    assert {"up.weight", "down.weight", "up.weight.quantised", "down.weight.amax_history"} <= written
    assert Key(0, LIVE, "quantised", "norm.weight") not in truth


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("could not broadcast input array from shape (6,) into shape (15,)", "c.weight"),
        ("could not broadcast input array from shape (6,) into shape (6,)", ""),
        ("could not broadcast input array from shape (5,) into shape (15,)", ""),
        ("expected 6 of 15 in 18", ""),
    ],
)
def test_an_error_that_names_two_sizes(text: str, says: str) -> None:
    scenario = Scenario.from_axes({"model": "groups", "checkpoint": "sharded"})
    found = explain_refusal(text, 3, context_of({}, {}, scenario))
    assert [says in e.text and e.confidence == "possible" for e in found] == ([True] if says else [])
