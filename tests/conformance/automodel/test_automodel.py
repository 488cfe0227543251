"""Real NeMo Automodel: loading, sharding, stepping and checkpoints on gloo ranks against the twin, bit for bit.

*Verifies*: scenarios of every model, format and kind of file pass on the newest release; the founding bug's regressions
pass on the releases that repaired it. That a regression shows its defect is test_regressions.py's; that its cure cures
it, test_cures.py's; what the system refuses for the library's sake, the conformance kit asks the library.

Nightly only: the first run installs four releases with the transformers that each needs, 190 MB each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.systems.automodel import SYSTEM
from shardproof.verdict import Verdict

from tests.conformance.regression_scenarios import regression

pytestmark = [pytest.mark.real, pytest.mark.nightly]

RELEASE = "0.7.0"
FOUNDING = sorted(
    file.name.removesuffix(".toml")
    for file in SYSTEM.folder.joinpath("regressions").iterdir()
    if file.name.startswith("2419")
)
BASE = Scenario(system=SYSTEM.name, model="hf_delta", checkpoint="safetensors").with_axes({"mesh": "1x2x1"})


def text(result: Result) -> str:
    return "\n".join([result.signature, result.reason, str(result.error)])


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"model": "hf_llama", "checkpoint": "torch_save", "load": "grow"},
        {"model": "hf_vision", "dtype": "fp32/param=bf16/reduce=fp32", "program": "restart"},
        {"options": "by_dtype", "dtype": "fp32/param=bf16/reduce=fp32", "load": "indivisible"},
        {"options": "by_dtype", "dtype": "mixed/param=bf16", "program": "twice", "checkpoint": "torch_save"},
        {"options": "by_dtype+file_bf16+pinned", "dtype": "bf16/param=bf16/reduce=fp32", "offload": "cpu"},
        {"options": "file_fp32", "dtype": "bf16", "mesh": "2x2x1", "optimizer": "sgd/clip=1.0"},
        {"options": "file_bf16", "mesh": "1x1x1", "program": "save_first", "dtype": "fp32/param=bf16"},
        {"options": "recipe_storage", "program": "train", "version": "0.6.0"},
        {"options": "recipe_storage", "program": "build", "version": "0.5.0"},
        {"dtype": "fp32/param=bf16/reduce=fp32", "load": "shrink", "options": "file_bf16"},
        {"options": "by_dtype+file_fp32", "dtype": "fp32/param=bf16/reduce=fp32"},
        {"options": "by_dtype+file_bf16", "dtype": "fp32", "reshard_after_forward": "false"},
        {"model": "qwen3_5", "dtype": "mixed/param=bf16/reduce=fp32", "options": "consolidated", "load": "grow"},
        {
            "model": "qwen3_5",
            "dtype": "bf16",
            "options": "file_bf16",
            "version": "0.5.0",
            "reshard_after_forward": "none",
        },
        {"model": "nemotron_h", "dtype": "fp32/param=bf16/reduce=fp32", "options": "consolidated+file_bf16"},
        {"model": "hf_vision", "dtype": "fp32/param=bf16/reduce=fp32", "options": "replicated_tower"},
        {"mesh": "1x2x2", "dtype": "fp32/param=bf16/reduce=fp32", "load": "tp_change", "checkpoint": "torch_save"},
        {"options": "file_fp32", "version": "0.4.0", "reshard_after_forward": "none", "program": "twice"},
    ],
    ids=str,
)
def test_a_pretrained_model_trains_and_resumes_bit_for_bit(laboratory: Laboratory, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert SYSTEM.refusal(scenario) is None
    result = laboratory.examine_one(scenario)
    assert result.verdict is Verdict.PASS, text(result)
    assert any("CPU under the name of a CUDA device" in entry for entry in result.emulated)


@pytest.mark.parametrize("name", FOUNDING)
@pytest.mark.parametrize("version", ["0.5.0", RELEASE])
def test_the_founding_bug_is_repaired_since(laboratory: Laboratory, name: str, version: str) -> None:
    result = laboratory.examine_one(replace(regression(SYSTEM, name), version=version))
    assert result.verdict is Verdict.PASS, text(result)
