"""Random generators of a model that is finetuned with Megatron-Bridge: Bridge's own `get_rng_state` saves them, and a
run that starts from the weights keeps its own; and scripts that do it wrong."""

from __future__ import annotations

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

from tests.conformance.megatron_bridge import careless

pytestmark = [pytest.mark.real, pytest.mark.nightly]  # Bridge takes long to import

DROPOUT = {
    "model": "dropout",
    "mesh": "1x1x2",
    "dtype": "bf16/master=fp32",
    "sharding": "zero1",
    "optimizer": "adamw/impl=multi_tensor",
    "checkpoint": "weights",
    "program": "build step save restart build load_model_only reload_params step",
    "microbatches": "2",
}


def examined(laboratory: Laboratory, system: str, **axes: str) -> Result:
    return laboratory.examine_one(Scenario.from_axes({"system": system, **DROPOUT, **axes}))


@pytest.mark.parametrize("axes", [{}, {"mesh": "1x2x1", "load": "grow"}, {"load": "tp_change"}], ids=str)
def test_generators_are_saved_and_finetuning_keeps_its_own(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = examined(laboratory, "megatron-bridge", **axes)
    assert (result.verdict, result.signature, result.reason) == (Verdict.PASS, "", "")


def test_ranks_that_are_seeded_alike_are_caught(laboratory: Laboratory) -> None:
    result = examined(laboratory, careless.ALL_AS_RANK_0.name)
    assert result.verdict is Verdict.MISMATCH
    assert {d.key.fqn for d in result.differences if d.key.where == "live"} == {"rank1.tensor", "rank1.expert"}
    assert "stream_of_another_rank" in {each.mechanism for each in result.explanations}


def test_a_checkpoint_without_generators_is_caught(laboratory: Laboratory) -> None:
    result = examined(laboratory, careless.SAVES_NONE.name)
    assert result.signature == f"{result.system} mismatch: save: written rng missing"
