"""The trainers that are shipped can be read, name releases to install, and have entries for what they show."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from shardproof.issues.cures import cures_of
from shardproof.issues.findings import section_of
from shardproof.issues.known_issues import known_issues_of
from shardproof.scenario import Scenario
from shardproof.trainer.described import described
from shardproof.trainer.system import register

from tests.paths import PYTHONPATH, ROOT

SHIPPED = sorted((ROOT / "scenarios/trainers").glob("*.py"))


def test_there_are_some() -> None:
    assert SHIPPED


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_trainer_can_be_read(file: object) -> None:
    found = described(str(file))
    assert found.axes
    assert all("==" in text for text in found.requires)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_what_a_shipped_trainer_shows_is_written_down_beside_it(file: Path) -> None:
    system = register(str(file))
    scenarios = {issue.scenario for issue in known_issues_of(system)}
    beside = Path(str(system.folder))
    assert scenarios == {f"regressions/{each.name}" for each in beside.glob("regressions/*.toml")}
    for name in scenarios:
        scenario = Scenario.from_axes(tomllib.loads((beside / name).read_text("utf-8"))["scenario"])
        assert scenario.system == system.name
        assert scenario.options, f"{name} says nothing of its cell"
    assert {f"regressions/{cure.id}.toml" for cure in cures_of(system)} <= scenarios
    for finding in section_of(system).findings:
        script = ROOT / f"docs/finding-scripts/{finding.id}.py"
        assert script.is_file()
        assert len(script.read_text("utf-8").splitlines()) <= 80
        assert f"[{finding.id}](finding-scripts/{script.name})" in (ROOT / "docs/trainer.md").read_text("utf-8")


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_trainer_passes_in_its_plainest_cell(file: Path, tmp_path: Path) -> None:
    axes = described(str(file)).axes
    plain = [word for axis, texts in axes.items() for word in ("--set", f"{axis}={texts[0]}")]
    command = [sys.executable, "-m", "shardproof", "trainer", str(file), "--out", str(tmp_path), "-q", *plain]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    ran = subprocess.run(command, env=environment, timeout=500, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
