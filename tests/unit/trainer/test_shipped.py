"""The trainers that are shipped can be read, name releases to install, and have entries for what they show."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from shardproof.issues.cures import cures_of
from shardproof.issues.findings import section_of
from shardproof.issues.known_issues import known_issues_of
from shardproof.protocol import registry
from shardproof.scenario import Scenario
from shardproof.trainer.described import described
from shardproof.trainer.system import register

from tests.paths import PYTHONPATH, ROOT

SHIPPED = sorted((ROOT / "scenarios/trainers").glob("*.py"))
QUICK = {"ddp_zero": "optimizer=sgd", "fsdp1": "kind=sharded"}
"""Trainers that need no package but torch, and a cell of theirs that takes seconds."""

DEFECTS = [
    (file, path) for file in SHIPPED for path in sorted(file.parent.glob(f"{file.stem}.shardproof/regressions/*"))
]


@pytest.fixture(autouse=True)
def _systems_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.all_systems()
    monkeypatch.setattr(registry, "_SYSTEMS", dict(registry._SYSTEMS))


def test_there_are_some() -> None:
    assert SHIPPED


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_trainer_can_be_read(file: object) -> None:
    found = described(str(file))
    assert found.axes
    assert all("==" in text for text in found.requires)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_trainer_imports_nothing_that_lies_beside_it(file: Path) -> None:
    nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    beside = {other.stem for other in SHIPPED} - {name.partition("==")[0] for name in described(str(file)).requires}
    assert not {name.partition(".")[0] for name in names} & beside


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


def verdicts(folder: Path, *words: str) -> list[str]:
    """The verdict of each result of a command."""
    written = folder / "found.json"
    command = [sys.executable, "-m", "shardproof", *words, "-q", "--json", str(written), "--out", str(folder / "out")]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    subprocess.run(command, env=environment, timeout=500, capture_output=True, check=False)
    results: list[dict[str, Any]] = json.loads(written.read_text("utf-8"))["results"]
    return [result["verdict"] for result in results]


@pytest.mark.real
@pytest.mark.parametrize("name", ["ddp_zero", pytest.param("fsdp1", marks=pytest.mark.nightly)])
def test_a_cell_of_a_shipped_trainer_passes(name: str, tmp_path: Path) -> None:
    file, (axis, value) = ROOT / f"scenarios/trainers/{name}.py", QUICK[name].split("=")
    cell = {other: texts[0] for other, texts in described(str(file)).axes.items()} | {axis: value}
    chosen = [word for pair in cell.items() for word in ("--set", "=".join(pair))]
    assert verdicts(tmp_path, "trainer", str(file), *chosen) == ["pass"]


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.parametrize(("file", "scenario"), DEFECTS, ids=lambda path: path.stem)
def test_a_known_defect_is_there_and_its_cure_takes_it_away(file: Path, scenario: Path, tmp_path: Path) -> None:
    words = ["run", str(scenario), "--plugin", str(file)]
    assert verdicts(tmp_path, *words) != ["pass"]
    if (scenario.parents[1] / f"cures/{scenario.stem}.patch").is_file():
        assert verdicts(tmp_path, *words, "--system", f"{described(str(file)).system}@+cured") == ["pass"]


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
