"""What is recorded of FusedAdam's state in TransformerEngine's system: nothing is cut off, so a comparison sees it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardproof.mechanisms.probe_module import Probe
from shardproof.observe.assemble import assemble
from shardproof.program import expand
from shardproof.scenario import Scenario
from shardproof.systems.transformer_engine.rank import MASTER, Rank
from shardproof.torch_loop.loop import context_of

from tests.whole_parameters import whole_box

SCENARIO = Scenario(system="transformer-engine", model="te_no_bias", program="build step").with_axes(
    {"mesh": "1x1x1", "dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor"}
)
FQN, SHAPE = "qkv.weight", (12, 6)


def problems(state: dict[str, torch.Tensor], options: str = "") -> set[tuple[str, str]]:
    """(role, kind) of what is wrong with the records of one parameter's state, by their boxes alone."""
    scenario = SCENARIO.with_axes({"options": options})
    parameter = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    rank: Any = object.__new__(Rank)
    rank.scenario, rank.context, rank.fused = scenario, context_of(scenario, Path()), True
    rank.spec, rank.mesh, rank.contract = rank.context.model, rank.context.mesh, rank.context.contract
    rank.probe = Probe(rank.context, whole_box(rank.spec))
    rank.state = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"params": [parameter], "step": 1}]))
    _, found = assemble(rank.state_records(expand(scenario)[1], FQN, parameter, state))
    return {(problem.key.role, problem.kind) for problem in found}


def sound(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"exp_avg": torch.zeros(SHAPE), "exp_avg_sq": torch.zeros(SHAPE), MASTER: torch.zeros(SHAPE, dtype=dtype)}


def test_state_in_the_shape_of_its_shard_is_sound() -> None:
    assert not problems(sound())
    assert not problems(sound(torch.int16), "remainders")


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", MASTER])
@pytest.mark.parametrize("shape", [(13, 6), (24, 6), (78,)], ids=str)
def test_a_state_that_is_longer_than_its_shard_is_a_problem(name: str, shape: tuple[int, ...]) -> None:
    role = "master" if name == MASTER else name
    assert {seen for seen, _ in problems({**sound(), name: torch.zeros(shape)})} == {role}


def test_remainders_that_are_longer_than_their_shard_are_a_problem() -> None:
    state = {**sound(), MASTER: torch.zeros((13, 6), dtype=torch.int16)}
    assert {role for role, _ in problems(state, "remainders")} == {"master"}
