"""What a load has broken in the groups and states of DeepSpeed's optimizer is observed, and is a difference; nothing
raises. The engine is stood for by the flat tensor that its wrapper steps, so that neither it nor a rank is needed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardproof.models import model_spec
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Logical
from shardproof.program import Op
from shardproof.scenario import Scenario
from shardproof.systems.deepspeed.flat import pieces
from shardproof.systems.deepspeed.rank import Rank
from torch import nn

from tests.conformance.broken_groups import (
    BROKEN,
    BUILD,
    NUMBERS,
    STEP,
    Break,
    Found,
    adam_of,
    differences,
    group_with,
    missing,
    no_groups,
    states_with,
)

SCENARIO = Scenario(system="deepspeed", sharding="zero1", checkpoint="zero")


def found_after(break_it: Break) -> Found:
    flat = nn.Parameter(torch.ones(sum(p.spec.numel for p in model_spec(SCENARIO.model).unique_params)))
    adam = adam_of([flat])

    def observed(op: Op) -> Logical:
        rank: Any = SimpleNamespace(
            context=SimpleNamespace(rank=0), pieces=pieces(SCENARIO, SCENARIO.mesh, 0),
            state=SimpleNamespace(optimizer=adam), _flat_tensors=lambda: [flat], _has_master=lambda piece: False,
        )  # fmt: skip
        for name in ("whole", "number", "text", "unknown", "_part"):
            setattr(rank, name, partial(getattr(Rank, name), rank))
        logical, problems = assemble(Rank.optimizer_records(rank, op))
        assert not problems
        return logical

    before = observed(BUILD)
    break_it(adam)
    return differences(before, observed(STEP), "up.weight")


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        *BROKEN,
        (group_with(step=2), set()),  # counted there by FusedAdam: no setting
        (states_with(stray=1), {("unknown", "stray", "extra")}),
    ],
)
def test_what_is_broken_is_a_difference(break_it: Break, found: Found) -> None:
    assert found_after(break_it) == found


def test_without_its_groups_their_numbers_and_settings_are_missing() -> None:
    found = found_after(no_groups)
    assert found >= missing("hyperparameter", *NUMBERS) | missing("setting", "lr", "initial_lr", "foreach")
    assert {(role, kind) for role, _, kind in found} == {("hyperparameter", "missing"), ("setting", "missing")}
