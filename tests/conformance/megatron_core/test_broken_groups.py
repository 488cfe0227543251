"""What a load has broken in Megatron-Core's param groups and states is observed, and is a difference; nothing raises.

The optimizer is one without a distributed optimizer around it, so that no rank is needed: groups and states are read in
the same way of every kind.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shardproof.mechanisms.megatron.rank.observe import observe
from shardproof.mechanisms.megatron.rank.state import TrainState
from shardproof.mechanisms.probe_module import Probe, build_model
from shardproof.observe.assemble import assemble
from shardproof.observe.logical import Logical
from shardproof.observe.record import OWNER_ROLES
from shardproof.program import Op
from shardproof.scenario import Scenario
from shardproof.torch_loop.loop import context_of

from tests.conformance.broken_groups import (
    BROKEN,
    BUILD,
    NUMBERS,
    STEP,
    Break,
    Found,
    adam_of,
    differences,
    missing,
    no_groups,
)

SCENARIO = Scenario(system="megatron-core", sharding="replicate", checkpoint="plain")


def found_after(break_it: Break, folder: Path) -> Found:
    context = context_of(SCENARIO, folder)
    shapes = {p.fqn: p.spec.shape for p in context.model.params}
    probe = Probe(context, lambda fqn: ((0,) * len(shapes[fqn]), shapes[fqn]))
    root = build_model(probe, 0)
    adam = adam_of([*root.parameters()], wd_mult=1.0)
    chain: Any = SimpleNamespace(optimizer=adam)
    state = TrainState(SCENARIO, context.model, context.mesh, 0, (0, 16, 1), [root], chain, None)

    def observed(op: Op) -> Logical:
        records = observe(state, op, probe, {}, None, context.contract)
        logical, problems = assemble([r for r in records if r.role in OWNER_ROLES])
        assert not problems
        return logical

    before = observed(BUILD)
    break_it(adam)
    return differences(before, observed(STEP), "up.weight")


@pytest.mark.parametrize(("break_it", "found"), BROKEN)
def test_what_is_broken_is_a_difference(tmp_path: Path, break_it: Break, found: Found) -> None:
    assert found_after(break_it, tmp_path) == found


def test_without_its_groups_all_that_an_optimizer_has_is_missing(tmp_path: Path) -> None:
    """Which parameters it steps is read from there."""
    found = found_after(no_groups, tmp_path)
    assert found >= missing("hyperparameter", *NUMBERS) | missing("setting", "lr", "initial_lr", "wd_mult")
    assert found >= missing("step", "") | missing("exp_avg", "") | missing("exp_avg_sq", "")
    assert {kind for _, _, kind in found} == {"missing"}
