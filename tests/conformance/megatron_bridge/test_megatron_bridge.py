"""Real Megatron-Bridge: its finetuning load on gloo ranks against the twin, bit for bit, its own `finetune()` from end
to end, and bug 3949 through both.

Nightly only: the first run installs Bridge and the 58 packages that importing it needs, 2 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.issues.known_issues import KnownIssues, known_issues_of
from shardproof.laboratory.laboratory import Laboratory
from shardproof.result import Result
from shardproof.scenario import Scenario
from shardproof.systems.megatron_bridge import SYSTEM
from shardproof.verdict import Verdict
from shardproof.world.environments import Environments
from shardproof.world.server import DETERMINISM

from tests.conformance.megatron_bridge.refreshed import REFRESHED
from tests.conformance.regression_scenarios import regression
from tests.paths import PYTHONPATH

pytestmark = [pytest.mark.real, pytest.mark.nightly]

ROOT = Path(__file__).parents[3]
END_TO_END = Path(__file__).with_name("finetune.py")
LEARNING_RATE = 2.0**-10
REGRESSIONS = ("3949", "3949-fp16")
BASE = Scenario(system=SYSTEM.name, sharding="zero1", checkpoint="weights", program="model_only").with_axes(
    {"dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor", "mesh": "1x2x1"}
)


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"version": "0.3.0"},
        {"dtype": "fp16/master=fp32"},
        {"dtype": "fp32", "mesh": "1x1x1"},
        {"dtype": "fp16/master=fp32", "optimizer": "adamw/impl=multi_tensor/clip=1.0/loss_scale=256.0"},
        {"checkpoint": "weights+fully_parallel", "mesh": "1x4x1", "load": "shrink", "model": "short"},
        {"mesh": "1x2x2", "model": "mixed_unit", "dtype": "mixed/master=fp32"},
        {"mesh": "2x1x1", "model": "many", "options": "overlap_grad_reduce+overlap_param_gather"},
        {"model": "tied", "optimizer": "adamw/impl=forloop", "load": "tp_change", "mesh": "1x1x1"},
        {"model": "gpt", "program": "model_only_late"},
        {"sharding": "replicate", "model": "frozen_tower"},
        {"options": "precision_aware"},
        {"options": "precision_aware", "offload": "cpu=0.5"},
        {"program": "train", "offload": "cpu=0.5"},
    ],
    ids=str,
)
def test_finetuning_starts_from_the_pretrained_weights(laboratory: Laboratory, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert SYSTEM.refusal(scenario) is None
    result = laboratory.examine_one(scenario)
    assert result.verdict is Verdict.PASS, text(result)
    assert "transformer_engine.pytorch (names of layers only)" in result.emulated


@pytest.mark.parametrize("name", REGRESSIONS)
def test_offloaded_copies_keep_the_initialisation(laboratory: Laboratory, name: str) -> None:
    result = laboratory.examine_one(regression(SYSTEM, name))
    assert result.verdict is Verdict.MISMATCH
    assert result.reproduced
    assert result.reproduced.times == result.reproduced.attempts, result.reason
    assert result.failed_op
    assert result.failed_op.name == "load_model_only"
    first = result.explanations[0].text
    assert "master of down.bias has its initialisation by operation 4 (build) after operation 5" in first
    known = KnownIssues(known_issues_of(SYSTEM)).match(result)
    assert known == "megatron-bridge-3949", text(result)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_refreshing_every_copy_cures_it(laboratory: Laboratory, name: str) -> None:
    result = laboratory.examine_one(replace(regression(SYSTEM, name), system=REFRESHED.name))
    assert result.verdict is Verdict.PASS, text(result)


@pytest.mark.parametrize(("fraction", "near", "far"), [("0", "moved", "from_start"), ("0.5", "from_start", "moved")])
def test_finetune_from_end_to_end(tmp_path: Path, fraction: str, near: str, far: str) -> None:
    """Bridge's own finetune(): its first step moves weights by one learning rate from the pretrained ones, or with
    offload from the random initialisation."""
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text("#!/bin/sh\n")  # Bridge compiles what the wheel has compiled already, and without a makefile
    make.chmod(0o755)
    environments = Environments(None, ())
    overlay = environments.overlay(environments.resolve(SYSTEM, ""))
    environment = {
        **os.environ, **DETERMINISM, **overlay.environment,
        "PATH": f"{make.parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, [*overlay.paths, PYTHONPATH])),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(END_TO_END), str(tmp_path), fraction]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    distances: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    assert max(distances[near].values()) <= 2 * LEARNING_RATE
    assert max(distances[far].values()) >= 50 * LEARNING_RATE


def text(result: Result) -> str:
    found = [*(explanation.text for explanation in result.explanations), result.reason, str(result.error)]
    return "\n".join([result.signature, *filter(None, found)])
