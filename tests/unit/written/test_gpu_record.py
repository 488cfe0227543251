"""The record of a GPU run for docs/gpu.md, made of two documents of `--json`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import report_samples as samples
from shardproof.errors import UsageError
from shardproof.report.json_report import to_json
from shardproof.result import Result

from docs.written.gpu_record import main, render_record

DEVICE = "1 x NVIDIA H200, one a rank, NCCL"


def on_gpu(result: Result) -> Result:
    return replace(result, scenario=replace(result.scenario, device="cuda"), device=DEVICE, emulated=())


def test_verdicts_and_what_the_cpu_had_said_otherwise() -> None:
    same, fixed, only = samples.passing(1), samples.crash(), samples.passing(2)
    cpu = to_json(samples.report(same, fixed))
    after = [on_gpu(result) for result in (same, replace(samples.passing(), scenario=fixed.scenario), only)]
    known = replace(on_gpu(samples.hang()), known_issue="torch-fsdp2-1")
    gpu = to_json(samples.report(*after, known, samples.unsupported()))
    text = render_record(cpu, gpu)
    assert text.startswith(f"### 2026-01-02: {DEVICE}\n")
    assert "`shardproof run nightly`; torch 2.13.0." in text
    assert "| torch-fsdp2 | pass | 3 |" in text
    assert "| torch-fsdp2 | hang | 1 |" in text
    assert "2 of them ran on the CPU too; 1 have the same verdict and evidence." in text
    (row,) = [line for line in text.splitlines() if "crash: save: RuntimeError" in line]
    assert row.endswith("| pass |")
    assert row.startswith("| 1 | torch-fsdp2 mesh=1x8x1")
    assert "(`confirmed_on_gpu`): torch-fsdp2-1." in text


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(to_json(samples.report(samples.passing()))))
    main([str(path), str(path)])
    assert "0 of them" in capsys.readouterr().out
    with pytest.raises(UsageError, match="allowed: two"):
        main([str(path)])
    with pytest.raises(UsageError, match=r"nothing\.json"):
        main([str(path), "nothing.json"])
