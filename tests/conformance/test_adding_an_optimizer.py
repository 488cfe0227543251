"""The worked example of docs/adding-an-optimizer.md: a training script's own AdamW under FSDP2.

*Verifies*: that it passes, sharded and resumed on other meshes; that both oracles agree on it, and would not if its
arithmetic were not AdamW's; that a mistake which only an empty shard shows is seen.
*Does not verify*: other formulas, which the page says are not possible yet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from shardproof.laboratory.laboratory import Laboratory
from shardproof.oracle import twin
from shardproof.oracle.inputs import Stepper
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

from tests.conformance.own_adamw import SYSTEM
from tests.conformance.own_adamw.hasty import HASTY
from tests.conformance.own_adamw.optimizer import OwnAdamW
from tests.oracles import by_reference, by_twin, inputs_of

BASE = Scenario(system=SYSTEM.name).with_axes({"mesh": "1x2x1", "optimizer": "adamw/impl=forloop"})


class OtherAdamW(OwnAdamW):
    """With another `eps` than it was given: not the arithmetic that the scenario asks for."""

    def _update(self, param: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        group = {**group, "eps": group["eps"] * 2.0**20}
        super()._update(param, state, group)


def other_for_the_twin(stepper: Stepper, groups: list[dict[str, Any]]) -> OtherAdamW:
    return OtherAdamW(groups)


@pytest.mark.real
@pytest.mark.parametrize(
    "axes",
    [{"program": "resume", "load": "shrink"}, {"dtype": "bf16", "model": "short", "mesh": "1x3x1", "load": "grow"}],
    ids=str,
)
def test_it_passes(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(BASE.with_axes(axes))
    assert result.verdict is Verdict.PASS, (result.signature, result.reason, result.error)


@pytest.mark.real
def test_a_step_that_an_empty_shard_skips_is_seen(laboratory: Laboratory) -> None:
    result = laboratory.examine_one(replace(BASE, system=HASTY.name, model="short", program="build step"))
    assert result.verdict is Verdict.MISMATCH, (result.signature, result.reason, result.error)
    assert "step gap" in result.signature
    assert result.explanations[0].mechanism == "bad_partition"


def test_both_oracles_agree_on_it() -> None:
    assert inputs_of(BASE).stepper.make
    assert by_twin(BASE) == by_reference(BASE)


def test_they_would_not_agree_on_another_formula() -> None:
    inputs = inputs_of(BASE)
    other = replace(inputs, stepper=replace(inputs.stepper, make=f"{__name__}:other_for_the_twin"))
    assert twin.run(other) != by_reference(BASE)
