"""What TransformerEngine's system refuses, as the parent decides it: neither torch nor the library is imported here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from shardproof.emulation import te_choice
from shardproof.errors import UsageError
from shardproof.scenario import Scenario
from shardproof.systems import torch_fsdp2
from shardproof.systems.transformer_engine import SYSTEM
from shardproof.systems.transformer_engine.accepts import ACCEPTS

BASE = Scenario(system="transformer-engine")
FUSED = "adamw/impl=multi_tensor"

QUANTISED = {"model": "te_layers", "optimizer": FUSED, "dtype": "bf16/master=fp32", "options": "fp8_current"}

VERSIONS = {"quantised-releases": "2.15.0"}
"""The release that a limit is about, where it is not about all."""

OUTSIDE = {
    "dtype-grad": {"optimizer": FUSED, "dtype": "bf16/master=fp32/grad=bf16"},
    "dtype-exp_avg": {"optimizer": FUSED, "dtype": "bf16/master=fp32/exp_avg=fp8e4m3"},
    "dtype-exp_avg_sq": {"optimizer": FUSED, "dtype": "bf16/master=fp32/exp_avg_sq=fp8e4m3"},
    "expert_parallel": {"model": "moe", "mesh": "1x2x1", "expert_parallel": "2"},
    "sharding": {"sharding": "zero1"},
    "offload-fraction": {"offload": "cpu=0.5"},
    "optimizer-schedule": {"optimizer": "adamw/schedule=linear"},
    "checkpoint": {"checkpoint": "bucket"},
    "options": {"options": "precision_aware"},
    "faults": {"faults": "swapped-states"},
}
"""Axis, or part of one → a scenario whose value of it the allow-list lacks."""

REFUSED = {
    "fused-sgd-here": {"optimizer": "sgd/impl=multi_tensor"},
    "master-of-fp32": {"optimizer": FUSED, "dtype": "fp32/master=fp32"},
    "torch-state": {"dtype": "bf16/master=fp32"},
    "master-dtype": {"optimizer": FUSED, "dtype": "fp16/master=bf16"},
    "rests-in-another-dtype": {
        "optimizer": FUSED,
        "model": "resting",
        "dtype": "bf16/master=fp32",
        "load_dtype": "fp16/master=fp32",
        "program": "restart",
    },
    "generators-device": {"device": "cuda", "model": "dropout"},
    "remainders-fp16": {"optimizer": FUSED, "dtype": "bf16/master=fp16", "options": "remainders"},
    "no-gradient": {"optimizer": FUSED, "model": "unused"},
    "remainders": {"optimizer": FUSED, "options": "remainders"},
    "remainders-of-masters": {
        "optimizer": FUSED,
        "dtype": "bf16/master=fp32",
        "program": "restart",
        "checkpoint": "full",
        "load_options": "remainders",
    },
    "capturable-torch": {"options": "capturable"},
    "capturable-remainders": {"optimizer": FUSED, "dtype": "bf16/master=fp32", "options": "capturable+remainders"},
    "capturable-moments": {"optimizer": FUSED, "dtype": "bf16/master=fp32/exp_avg=bf16", "options": "capturable"},
    "meta": {"options": "meta"},
    "tags": {"options": "tags", "model": "te_layers"},
    "quantised-layers": {**QUANTISED, "model": "dense"},
    "quantised-releases": QUANTISED,
    "quantised-split": {**QUANTISED, "model": "te_transformer"},
    "quantised-capturable": {**QUANTISED, "options": "capturable+fp8_delayed"},
    "quantised-master": {**QUANTISED, "dtype": "fp16/master=fp32"},
    "quantised-programs": {**QUANTISED, "program": "model_only"},
    "quantised-tp": {**QUANTISED, "mesh": "1x2x2"},
    "quantised-once": {**QUANTISED, "options": "fp8_current+fp8_delayed"},
    "quantised-remainders": {**QUANTISED, "options": "fp8_current+remainders"},
    "quantised-full": {**QUANTISED, "checkpoint": "full"},
    "calibrating": {"options": "calibrating"},
    "extra-state": {"options": "no_extra_state"},
    "tp-divides": {"model": "te_layers", "mesh": "1x1x4"},
}


@pytest.mark.parametrize("limit", [*OUTSIDE, *REFUSED])
def test_each_limit_refuses_its_scenario_with_its_reason(limit: str) -> None:
    (entry,) = (entry for entry in ACCEPTS.limits if entry.id == limit)
    scenario = replace(BASE.with_axes({**OUTSIDE, **REFUSED}[limit]), version=VERSIONS.get(limit, ""))
    assert entry.refuses(scenario)
    assert SYSTEM.refusal(scenario) == entry.reason


def test_every_limit_is_covered_here_or_is_fsdp2s() -> None:
    strict = ("strict-more-broadcast", "strict-more", "strict-fewer", "strict-frozen", "left-out-thawed")
    strict += ("as-returned-live", "as-returned-keeps", "tied-safetensors")  # of its options and formats
    of_fsdp2 = tuple(
        limit
        for limit in torch_fsdp2.SYSTEM.accepts.own_limits
        if limit.id not in strict and not limit.id.startswith("ignored-")
    )  # its axes
    assert ACCEPTS.own_limits[: len(of_fsdp2)] == of_fsdp2
    assert [entry.id for entry in ACCEPTS.own_limits[len(of_fsdp2) :]] == list(REFUSED)


@pytest.mark.parametrize(
    "axes",
    [
        {"model": "te_layers", "mesh": "1x2x2"},
        {"model": "te_layers", "options": "meta+no_extra_state"},
        {"optimizer": FUSED, "dtype": "bf16/master=fp32/exp_avg=bf16/exp_avg_sq=bf16", "options": "capturable"},
        {"optimizer": FUSED, "dtype": "mixed/master=fp32", "options": "remainders", "model": "twins"},
        {"optimizer": FUSED, "dtype": "bf16/master=fp16/exp_avg=fp16/exp_avg_sq=fp16", "options": "again"},
        {"model": "frozen_tower"},
        QUANTISED,
        {
            **QUANTISED,
            "model": "te_attention",
            "mesh": "2x2x1",
            "checkpoint": "dcp-async",
            "options": "fp8_delayed+meta",
        },
        {"model": "te_layers", "options": "calibrating+no_extra_state"},
    ],
    ids=str,
)
def test_neighbours_of_the_limits_are_supported(axes: dict[str, str]) -> None:
    assert SYSTEM.refusal(BASE.with_axes(axes)) is None


def test_which_extension_runs_is_one_decision_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(te_choice.VARIABLE, raising=False)
    assert SYSTEM.device_choices("cuda") == {"compiled extension": "real, on a GPU"}
    assert te_choice.choice("cpu").kind == te_choice.EMULATED
    monkeypatch.setenv(te_choice.VARIABLE, "real")
    assert te_choice.choice("cpu").kind == te_choice.REAL


def test_another_extension_than_the_two_is_an_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(te_choice.VARIABLE, "both")
    with pytest.raises(UsageError, match=r"SHARDPROOF_TE_EXTENSION: given 'both'; allowed: real, emulated, unset"):
        SYSTEM.device_choices("cpu")


def test_the_parent_imports_neither_torch_nor_the_library() -> None:
    code = (
        "import sys; from shardproof.systems.transformer_engine import SYSTEM as s; s.accepts, s.contract, s.stored;"
        "s.models; print({'torch', 'transformer_engine'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
