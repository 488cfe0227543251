"""What TransformerEngine's system refuses, as the parent decides it: neither torch nor the library is imported here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from harness.emulation import te_choice
from harness.errors import UsageError
from harness.scenario import Scenario
from harness.systems.transformer_engine import INFO, KEPT, LIMITS, unsupported

BASE = Scenario(system="transformer-engine")
FUSED = "adamw/impl=multi_tensor"

QUANTISED = {"model": "te_layers", "optimizer": FUSED, "dtype": "bf16/master=fp32", "options": "fp8_current"}

VERSIONS = {"quantised-releases": "2.15.0"}
"""The release that a limit is about, where it is not about all."""

REFUSED = {
    "fused-sgd-here": {"optimizer": "sgd/impl=multi_tensor"},
    "master-of-fp32": {"optimizer": FUSED, "dtype": "fp32/master=fp32"},
    "torch-state": {"dtype": "bf16/master=fp32"},
    "master-dtype": {"optimizer": FUSED, "dtype": "fp16/master=bf16"},
    "fp8-state": {"optimizer": FUSED, "dtype": "bf16/master=fp32/exp_avg=fp8e4m3"},
    "remainders-fp16": {"optimizer": FUSED, "dtype": "bf16/master=fp16", "options": "remainders"},
    "no-gradient": {"optimizer": FUSED, "model": "unused"},
    "grad-dtype": {"optimizer": FUSED, "dtype": "bf16/master=fp32/grad=bf16"},
    "remainders": {"optimizer": FUSED, "options": "remainders"},
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
    "options": {"options": "precision_aware"},
}


@pytest.mark.parametrize("limit", REFUSED)
def test_each_limit_refuses_its_scenario_with_its_reason(limit: str) -> None:
    entry = next(entry for entry in LIMITS if entry.id == limit)
    scenario = replace(BASE.with_axes(REFUSED[limit]), version=VERSIONS.get(limit, ""))
    assert entry.refuses(scenario)
    assert unsupported(scenario) == entry.reason


def test_every_limit_is_covered_here_or_is_fsdp2s() -> None:
    assert [*KEPT, *REFUSED] == [entry.id for entry in LIMITS]


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
    assert unsupported(BASE.with_axes(axes)) is None


def test_which_extension_runs_is_one_decision_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(te_choice.VARIABLE, raising=False)
    assert INFO.chosen("cuda") == {"compiled extension": "real, on a GPU"}
    assert te_choice.choice("cpu").kind == te_choice.EMULATED
    monkeypatch.setenv(te_choice.VARIABLE, "real")
    assert te_choice.choice("cpu").kind == te_choice.REAL


def test_another_extension_than_the_two_is_an_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(te_choice.VARIABLE, "both")
    with pytest.raises(UsageError, match=r"SHARDPROOF_TE_EXTENSION: given 'both'; allowed: real, emulated, unset"):
        unsupported(BASE)


def test_the_parent_imports_neither_torch_nor_the_library() -> None:
    code = (
        "import sys, harness.systems.transformer_engine as s; print({'torch', 'transformer_engine'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
