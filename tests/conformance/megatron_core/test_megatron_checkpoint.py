"""Every checkpoint format of real Megatron-Core: written, read back independently, loaded at equal and other sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.systems.megatron_core import SYSTEM
from shardproof.systems.megatron_core.formats import FORMATS, checkpoint_plan
from shardproof.versions import before

from tests.conformance.megatron_core import RELEASE
from tests.conformance.megatron_core.test_megatron_core import BASE
from tests.conformance.sessions import assert_equals_the_twin, judged, run

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    "axes",
    [
        {"checkpoint": "dp_zero", "load": "grow", "model": "groups"},
        {"checkpoint": "dp_zero", "model": "moe", "expert_parallel": "2"},
        {"checkpoint": "dp_zero_gather_scatter", "load": "indivisible"},
        {"checkpoint": "dp_reshardable", "mesh": "1x2x2", "model": "groups"},
        {"checkpoint": "dp_reshardable+fully_parallel", "load": "shrink"},
        {"checkpoint": "dp_reshardable", "model": "moe", "expert_parallel": "2"},
        {"checkpoint": "fully_reshardable", "mesh": "1x2x2", "model": "swiglu", "load": "tp_change"},
        {"checkpoint": "fully_reshardable+async+fully_parallel", "model": "tied"},
        {"checkpoint": "fully_reshardable+mem_efficient", "model": "gpt", "program": "twice"},
        {"checkpoint": "plain", "sharding": "replicate", "mesh": "1x2x2", "dtype": "fp16/master=fp32",
         "optimizer": "adamw/impl=multi_tensor/loss_scale=256.0/schedule=linear"},
        {"checkpoint": "sharded", "sharding": "replicate", "load": "tp_change", "model": "swiglu"},
        {"checkpoint": "fsdp_dtensor", "options": "fsdp_optim_grads_params", "model": "gated", "load": "grow"},
        {"checkpoint": "sharded+async+fully_parallel", "sharding": "replicate", "optimizer": "adamw/impl=forloop"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_written_and_loaded_is_the_twin(laboratory: Laboratory, tmp_path: Path, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes({"program": "resume", **axes})
    assert SYSTEM.refusal(scenario) is None
    assert_equals_the_twin(laboratory, scenario, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "axes",
    [
        {"model": "frozen_tower", "mesh": "1x3x1"},
        {"model": "experts", "dtype": "fp32"},
        {"dtype": "fp32", "optimizer": "adamw/impl=forloop", "program": "build step save step save"},
        {"mesh": "2x1x1", "options": "fsdp_optim_grads_params", "microbatches": "2"},
    ],
    ids=str,
)
def test_under_megatron_fsdp_the_cured_release_is_the_twin(
    laboratory: Laboratory, tmp_path: Path, axes: dict[str, str]
) -> None:
    """A frozen weight is stored as it is; experts of an fp32 model lie with the rest; a second save has the second
    count of an empty shard's steps; what is not sharded is scaled once."""
    base = {"program": "resume", "checkpoint": "fsdp_dtensor", "options": "fsdp_optim", "version": f"{RELEASE}+cured"}
    scenario = BASE.with_axes({**base, **axes})
    assert SYSTEM.refusal(scenario) is None
    assert_equals_the_twin(laboratory, scenario, tmp_path)


@pytest.mark.parametrize("form", ["dp_zero", "dp_reshardable", "fully_reshardable"])
def test_a_stale_index_map_shows_in_what_is_written(laboratory: Laboratory, tmp_path: Path, form: str) -> None:
    """NVIDIA/Megatron-LM issue 2777, silent with equal shapes: the load undoes what the save did."""
    axes = {"checkpoint": form, "model": "twins", "dtype": "mixed/master=fp32", "program": "build step save"}
    scenario = BASE.with_axes(axes)
    outcomes = run(laboratory, scenario, tmp_path)
    judgement = judged(laboratory, scenario, tmp_path, outcomes)
    wrong = {(d["where"], d["role"], d["name"], d["kind"]) for d in judgement["differences"]}
    assert {("written", "exp_avg", f"{name}.weight", "bits") for name in ("a", "b", "router", "scale")} <= wrong
    assert {d["where"] for d in judgement["differences"]} == {"written"}
    assert judgement["explanations"][0]["mechanism"] == "permuted_parameters"


def test_the_text_of_a_format() -> None:
    plan = checkpoint_plan("fully_reshardable+async+fully_parallel")
    assert (plan.form, plan.asynchronous, plan.fully_parallel, plan.legacy) == ("fully_reshardable", True, True, False)
    assert checkpoint_plan("fully_reshardable+fully_parallel+async") == plan, "switches in any order"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_takes_its_own_switches(name: str) -> None:
    """Each at most once; what another format has, and what none has, is refused."""
    form = FORMATS[name]
    others = {switch for other in FORMATS.values() for switch in other.switches} - {*form.switches}
    scenario = BASE.with_axes({"sharding": form.sharding, "program": "train"})
    assert SYSTEM.refusal(scenario.with_axes({"checkpoint": "+".join([name, *form.switches])})) is None
    for switch in (*others, "no_such_switch", *(f"{switch}+{switch}" for switch in form.switches)):
        refusal = SYSTEM.refusal(scenario.with_axes({"checkpoint": f"{name}+{switch}"}))
        assert "megatron-core has these values of checkpoint" in str(refusal), switch


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"checkpoint": "dcp"}, "megatron-core has these values of checkpoint: dp_zero"),
        ({"checkpoint": "plain"}, "sharding=replicate: sharded, plain"),
        ({"checkpoint": "fully_reshardable", "version": "0.14.0"}, "came with 0.15"),
        ({"checkpoint": "dp_zero", "mesh": "1x2x2", "load": "tp_change"}, "loads at the same such size only"),
    ],
)
def test_what_a_format_cannot_do(axes: dict[str, str], reason: str) -> None:
    assert reason in str(SYSTEM.refusal(BASE.with_axes({"program": "resume", **axes})))


def test_a_version_that_is_no_release_is_the_newest() -> None:
    assert before("0.15.3", "0.15.4")
    assert not before("0.15.3", "0.15.3")
    assert not any(before(version, "99") for version in ("git:core_v0.17.0", "path:/some/tree", ""))
