"""Random generators of a training script over FSDP2, with dropout as what draws from them: saved by real ranks, and
restored in fresh ones; and scripts that do it wrong."""

from __future__ import annotations

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.protocol.system import System
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.verdict import Verdict

from tests.conformance.torch_fsdp2 import careless

pytestmark = pytest.mark.real

DROPOUT = {"model": "dropout", "mesh": "1x2x1", "microbatches": "2"}


@pytest.mark.parametrize(
    "axes",
    [
        {"mesh": "1x2x2", "load": "tp_change"},
        pytest.param({"checkpoint": "full+broadcast_from_rank0"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint": "full", "load": "grow"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint": "dcp-stateful", "load": "grow"}, marks=pytest.mark.nightly),
        pytest.param({"checkpoint": "dcp-async", "program": "rollback"}, marks=pytest.mark.nightly),
        pytest.param({"program": "accumulation", "optimizer": "adamw"}, marks=pytest.mark.nightly),
        pytest.param({"program": "restart", "mesh": "2x2x1"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_generators_are_saved_and_restored(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(Scenario.from_axes({"system": "torch-fsdp2", **DROPOUT, **axes}))
    assert (result.verdict, result.signature, result.reason) == (Verdict.PASS, "", "")


def examined(laboratory: Laboratory, system: System) -> Result:
    axes = {"system": system.name, **DROPOUT, "program": "build step save step restart build load step"}
    return laboratory.examine_one(Scenario.from_axes(axes))


def test_a_script_that_forgets_its_generators_is_caught(laboratory: Laboratory) -> None:
    result = examined(laboratory, careless.FORGETS)
    assert result.signature == f"{result.system} mismatch: load: rng bits"
    assert {d.key.fqn.partition(".")[2] for d in result.differences} == {
        "replicated", "torch", "tensor", "expert", "data",
    }  # fmt: skip


def test_a_script_that_saves_rank_0s_for_all_is_caught_and_explained(laboratory: Laboratory) -> None:
    result = examined(laboratory, careless.RANK_0S)
    assert result.verdict is Verdict.MISMATCH
    assert {d.key.fqn for d in result.differences} == {"rank1.data"}
    assert result.explanations[0].mechanism == "stream_of_another_rank"
