"""Every checkpoint format of real Megatron-Core: written, read back independently, loaded at equal and other sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_megatron_core import BASE, Servers, judged, run, servers  # noqa: F401  (servers is a fixture)

from harness.systems.megatron_core import unsupported
from harness.systems.megatron_core_formats import FORMATS, checkpoint_plan, release_of

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
def test_what_is_written_and_loaded_is_the_twin(servers: Servers, tmp_path: Path, axes: dict[str, str]) -> None:  # noqa: F811
    scenario = BASE.with_axes({"program": "resume", **axes})
    assert unsupported(scenario) is None
    outcomes = run(servers(scenario), scenario, tmp_path)
    assert all(outcome.ok for outcome in outcomes), outcomes
    judgement = judged(servers(scenario), scenario, tmp_path, outcomes)
    assert judgement["differences"] == []
    assert judgement["distrust"] == ""


@pytest.mark.parametrize("form", ["dp_zero", "dp_reshardable", "fully_reshardable"])
def test_a_stale_index_map_shows_in_what_is_written(servers: Servers, tmp_path: Path, form: str) -> None:  # noqa: F811
    """NVIDIA/Megatron-LM issue 2777, silent with equal shapes: the load undoes what the save did."""
    axes = {"checkpoint": form, "model": "twins", "dtype": "mixed/master=fp32", "program": "build step save"}
    scenario = BASE.with_axes(axes)
    outcomes = run(servers(scenario), scenario, tmp_path)
    assert all(outcome.ok for outcome in outcomes), outcomes
    judgement = judged(servers(scenario), scenario, tmp_path, outcomes)
    wrong = {(d["where"], d["role"], d["name"], d["kind"]) for d in judgement["differences"]}
    assert {("written", "exp_avg", f"{name}.weight", "bits") for name in ("a", "b", "router", "scale")} <= wrong
    assert {d["where"] for d in judgement["differences"]} == {"written"}
    assert judgement["explanations"][0]["mechanism"] == "permuted_parameters"


def test_the_text_of_a_format() -> None:
    plan = checkpoint_plan("fully_reshardable+async+fully_parallel")
    assert plan
    assert (plan.form, plan.asynchronous, plan.fully_parallel, plan.legacy) == ("fully_reshardable", True, True, False)
    assert checkpoint_plan("dp_zero+async") is None
    assert checkpoint_plan("fully_reshardable+fully_parallel+async") is None, "switches in order"
    assert all(checkpoint_plan("+".join([name, *form.switches])) for name, form in FORMATS.items())


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"checkpoint": "dcp"}, "megatron-core has these checkpoint formats"),
        ({"checkpoint": "plain"}, "sharding=replicate: sharded, plain"),
        ({"checkpoint": "fully_reshardable", "version": "0.14.0"}, "came with 0.15"),
        ({"checkpoint": "dp_zero", "mesh": "1x2x2", "load": "tp_change"}, "loads at the same such size only"),
    ],
)
def test_what_a_format_cannot_do(axes: dict[str, str], reason: str) -> None:
    assert reason in str(unsupported(BASE.with_axes({"program": "resume", **axes})))


def test_a_version_that_is_no_release_is_the_newest() -> None:
    assert release_of("0.15.3") == (0, 15, 3)
    assert release_of("git:core_v0.17.0") == release_of("path:/some/tree") == release_of("") > (0, 19, 0)
