"""Real NeMo Automodel: loading, sharding, stepping and checkpoints on gloo ranks against the twin, bit for bit; its
limits; its regressions and what cures them.

*Verifies*: scenarios of every model, format and kind of file pass on the newest release; what the system refuses for
the library's sake, the library refuses; every regression shows its defect, is known, and passes with its patch or on
the release that repaired it.
*Does not verify*: that a patch is how upstream should repair it.

Nightly only: the first run installs four releases with the transformers that each needs, 190 MB each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.result import Result
from harness.scenario import Scenario
from harness.systems.accepts import Limit
from harness.systems.automodel import SYSTEM
from harness.systems.registry import register
from harness.verdict import Verdict
from tests.conformance.patched import changed_lines, patched, patches_of, regression
from tests.conformance.variants import without_limits

pytestmark = [pytest.mark.real, pytest.mark.nightly]

RELEASE = "0.7.0"
FOUNDING = sorted(
    file.name.removesuffix(".toml")
    for file in SYSTEM.folder.joinpath("regressions").iterdir()
    if file.name.startswith("2419")
)
MOST_LINES = 26
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


REFUSED = {
    "replicas-alone": {"mesh": "2x1x1", "program": "train"},
    "mixed-storage-unit": {"dtype": "mixed", "program": "train"},
    "clip-tensor-parallel": {"mesh": "1x1x2", "optimizer": "adamw/clip=1.0", "program": "train"},
    "reshard-field": {"version": "0.4.0", "program": "build"},
    "reshard-by-dtype": {"version": "0.5.0", "options": "by_dtype", "program": "build"},
}
"""Limit → a scenario that it refuses."""

RAISED = [limit for limit in SYSTEM.accepts.limits if limit.error]


@pytest.fixture
def lifted() -> Iterator[None]:
    """The system without its limits."""
    register(without_limits(SYSTEM))
    yield
    register(SYSTEM)


@pytest.mark.usefixtures("lifted")
@pytest.mark.parametrize("limit", RAISED, ids=lambda limit: limit.id)
def test_what_we_refuse_the_library_refuses(laboratory: Laboratory, limit: Limit) -> None:
    scenario = BASE.with_axes(REFUSED[limit.id])
    assert SYSTEM.refusal(scenario) == limit.reason
    result = laboratory.examine_one(scenario)
    assert limit.error
    said = f"{result.error.type}: {result.error.message}" if result.error else result.reason  # of a call's arguments
    assert limit.error.kind in said, text(result)
    assert limit.error.message in said


@pytest.mark.parametrize("name", FOUNDING)
@pytest.mark.parametrize("version", ["0.5.0", RELEASE])
def test_the_founding_bug_is_repaired_since(laboratory: Laboratory, name: str, version: str) -> None:
    result = laboratory.examine_one(replace(regression(SYSTEM, name), version=version))
    assert result.verdict is Verdict.PASS, text(result)


@pytest.mark.parametrize("name", patches_of(SYSTEM))
def test_a_few_lines_cure_it(laboratory: Laboratory, name: str, tmp_path: Path) -> None:
    assert changed_lines(SYSTEM, name) <= MOST_LINES
    version = patched(SYSTEM, RELEASE, [name], tmp_path)
    result = laboratory.examine_one(replace(regression(SYSTEM, name), version=version))
    assert result.verdict is Verdict.PASS, text(result)
