"""What TransformerEngine's system refuses, as the parent decides it: neither torch nor the library is imported here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.scenario import Scenario
from harness.systems.transformer_engine import KEPT, LIMITS, unsupported

BASE = Scenario(system="transformer-engine")
FUSED = "adamw/impl=multi_tensor"

REFUSED = {
    "fused-sgd-here": {"optimizer": "sgd/impl=multi_tensor"},
    "half-without-master": {"optimizer": FUSED, "dtype": "bf16"},
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
    "extra-state": {"options": "no_extra_state"},
    "tp-divides": {"model": "te_layers", "mesh": "1x1x4"},
    "options": {"options": "precision_aware"},
}


@pytest.mark.parametrize("limit", REFUSED)
def test_each_limit_refuses_its_scenario_with_its_reason(limit: str) -> None:
    entry = next(entry for entry in LIMITS if entry.id == limit)
    assert entry.refuses(BASE.with_axes(REFUSED[limit]))
    assert unsupported(BASE.with_axes(REFUSED[limit])) == entry.reason


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
    ],
    ids=str,
)
def test_neighbours_of_the_limits_are_supported(axes: dict[str, str]) -> None:
    assert unsupported(BASE.with_axes(axes)) is None


def test_the_parent_imports_neither_torch_nor_the_library() -> None:
    code = (
        "import sys, harness.systems.transformer_engine as s; print({'torch', 'transformer_engine'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
