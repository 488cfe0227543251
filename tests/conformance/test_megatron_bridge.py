"""Real Megatron-Bridge on real gloo ranks: its finetuning load against the twin, bit for bit, and founding bug 3949.

Nightly only: the first run installs Bridge and the 58 packages that importing it needs, 2 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from harness.known_issues import load_known_issues
from harness.laboratory import Laboratory
from harness.result import Result
from harness.scenario import Scenario
from harness.systems.megatron_bridge import unsupported
from harness.verdict import Verdict

pytestmark = [pytest.mark.real, pytest.mark.nightly]

SCENARIOS = Path(__file__).parents[2] / "scenarios"
REGRESSIONS = ("megatron-bridge-3949", "megatron-bridge-3949-fp16")
BASE = Scenario(system="megatron-bridge", sharding="zero1", checkpoint="weights", program="model_only").with_axes(
    {"dtype": "bf16/master=fp32", "optimizer": "adamw/impl=multi_tensor", "mesh": "1x2x1"}
)

REPAIRED = '''
from dataclasses import replace
import torch
from harness.systems.megatron_bridge import INFO
from harness.systems.megatron_bridge_rank import BridgeRank
from harness.systems.megatron_core_observe import owned_parts
from harness.systems.registry import register

class Repaired(BridgeRank):
    """Every copy that the optimizer holds, master or host copy, is refreshed after Bridge's load."""

    @torch.no_grad()
    def load_model_only(self, op):
        super().load_model_only(op)
        for part in owned_parts(self.state):
            shard = self.state.root.get_parameter(part.fqn).view(-1)[part.start : part.start + part.length]
            for copy in (part.held, part.stepped):
                copy.view(-1).copy_(shard)

register(replace(INFO, entry="repaired:Repaired"))
'''


def laboratory(plugins: tuple[str, ...] = ()) -> AbstractContextManager[Laboratory]:
    return Laboratory(jobs=1, deadline_s=60.0, plugins=plugins)


@pytest.fixture(scope="module")
def opened() -> Iterator[Laboratory]:
    with laboratory() as found:
        yield found


def regression(name: str) -> Scenario:
    file = SCENARIOS / "regressions" / f"{name}.toml"
    return Scenario.from_toml(file.read_text(), file.name)


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
def test_finetuning_starts_from_the_pretrained_weights(opened: Laboratory, axes: dict[str, str]) -> None:
    scenario = BASE.with_axes(axes)
    assert unsupported(scenario) is None
    result = opened.examine_one(scenario)
    assert result.verdict is Verdict.PASS, text(result)
    assert "transformer_engine.pytorch (names of layers only)" in result.emulated


@pytest.mark.parametrize("name", REGRESSIONS)
def test_offloaded_copies_keep_the_initialisation(opened: Laboratory, name: str) -> None:
    result = opened.examine_one(regression(name))
    assert result.verdict is Verdict.MISMATCH
    assert result.reproduced
    assert result.reproduced.times == result.reproduced.attempts
    assert result.failed_op
    assert result.failed_op.name == "load_model_only"
    first = result.explanations[0].text
    assert "master of down.bias is unchanged by operation 5 (load_model_only)" in first
    assert "still has its initialisation by operation 4 (build)" in first
    known = load_known_issues(SCENARIOS / "known_issues.toml").match(result)
    assert known == "megatron-bridge-3949", text(result)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_refreshing_every_copy_cures_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repaired.py").write_text(REPAIRED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with laboratory(plugins=("repaired",)) as repaired:
        result = repaired.examine_one(regression(name))
    assert result.verdict is Verdict.PASS, text(result)


def text(result: Result) -> str:
    found = [*(explanation.text for explanation in result.explanations), result.reason, str(result.error)]
    return "\n".join([result.signature, *filter(None, found)])
