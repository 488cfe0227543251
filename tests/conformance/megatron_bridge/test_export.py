"""The script of Megatron-Bridge's failure as a text: which calls it makes, and what is refused. No library runs."""

from __future__ import annotations

import pytest

from harness.cure_table import scenario_of
from harness.diff import Difference
from harness.export.case import NoExportError
from harness.export.issue import Written
from harness.export.job import written
from harness.observe.logical import Key
from harness.program import expand
from harness.result import FailedOp, Result
from harness.scenario import Scenario
from harness.systems.megatron_bridge import SYSTEM
from harness.verdict import Verdict

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
    told = made_of(FINETUNED, "megatron-bridge-3949").told
    assert told.cure == "3949"
    assert "distrib_optimizer.py" in told.patch


def test_what_a_script_cannot_do_is_refused() -> None:
    with pytest.raises(NoExportError, match="precision-aware"):
        made_of(FINETUNED.with_axes({"options": "precision_aware"}))
