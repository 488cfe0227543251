"""The script of Megatron-Bridge's failure as a text: which calls it makes, and what is refused. No library runs."""

from __future__ import annotations

import pytest
from shardproof.diff import Difference
from shardproof.export.case import NoExportError
from shardproof.export.issue import Written
from shardproof.export.job import written
from shardproof.investigate.cure_table import scenario_of
from shardproof.observe.logical import Key
from shardproof.program import expand
from shardproof.result import FailedOp, Result
from shardproof.scenario import Scenario
from shardproof.systems.megatron_bridge import SYSTEM
from shardproof.verdict import Verdict

FINETUNED = scenario_of(SYSTEM, "3949")


def made_of(scenario: Scenario, known: str | None = None) -> Written:
    op = next(op for op in expand(scenario) if op.kind == "load_model_only")
    difference = Difference(Key(op.index, "live", "master", "up.weight"), "bits", (0,), 1, 4)
    failed = FailedOp(op.index, op.kind)
    result = Result(scenario, "megatron-bridge", "0.3.1", Verdict.MISMATCH, differences=(difference,), failed_op=failed)
    made = written(result, known)
    compile(made.script, "repro.py", "exec")
    return made


def test_masters_must_be_those_of_the_weights_that_were_loaded() -> None:
    lines = [line.strip() for line in made_of(FINETUNED).script.splitlines()]
    loaded = lines.index("load_checkpoint(bridge(pretrained_checkpoint=CHECKPOINT), [model], optimizer, None)")
    assert lines[loaded + 1] == "expected = model.module.weight.detach().flatten().float().cpu()"


def test_the_module_beside_it_has_the_names_of_the_layers() -> None:
    shims = made_of(FINETUNED).draft.shims
    compile(shims["gpu_on_cpu.py"], "gpu_on_cpu.py", "exec")
    assert "class Absent(torch.nn.Module):" in shims["gpu_on_cpu.py"]


def test_the_cure_is_that_of_the_system_below() -> None:
    told = made_of(FINETUNED, "megatron-bridge-3949").description
    assert told.cure == "3949"
    assert "distrib_optimizer.py" in told.patch


def test_what_a_script_cannot_do_is_refused() -> None:
    with pytest.raises(NoExportError, match="precision-aware"):
        made_of(FINETUNED.with_axes({"options": "precision_aware"}))
