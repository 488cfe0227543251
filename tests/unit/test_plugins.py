"""A plugin's models, programs and faults are known by name, and none takes the name of another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.faults.boundary import BOUNDARY
from shardproof.faults.catalogue import CATALOGUE
from shardproof.models import ZOO, model_spec
from shardproof.plugins import register_boundary_fault, register_fault, register_model, register_program
from shardproof.program import operations
from shardproof.verdict import ExitStatus

ROOT = Path(__file__).parents[2]

FAULT = CATALOGUE["no-op-load"]
STRIKE = BOUNDARY["boundary.kill-rank"]
MODEL = model_spec("dense")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    kept = [(known, dict(known)) for known in (CATALOGUE, BOUNDARY, ZOO)]
    yield
    for known, before in kept:
        known.clear()
        known.update(before)


def test_what_is_registered_is_known_by_its_name() -> None:
    assert register_fault(replace(FAULT, id="mine")) is CATALOGUE["mine"]
    assert register_boundary_fault(replace(STRIKE, id="boundary.mine")) is BOUNDARY["boundary.mine"]
    assert register_model(replace(MODEL, name="mine")) is model_spec("mine")
    assert operations(register_program("of_test_extend", "build step")) == ("build", "step")


def test_the_same_again_is_no_error() -> None:
    assert register_fault(FAULT) is FAULT
    assert register_boundary_fault(STRIKE) is STRIKE
    assert register_model(MODEL) is MODEL


def test_a_name_that_is_taken_is_an_error() -> None:
    with pytest.raises(UsageError, match="no-op-load"):
        register_fault(replace(FAULT, doc="another"))
    with pytest.raises(UsageError, match="kill-rank"):
        register_boundary_fault(replace(STRIKE, doc="another"))
    with pytest.raises(UsageError, match="dense"):
        register_model(replace(MODEL, doc="another"))
    with pytest.raises(UsageError, match="resume"):
        register_program("resume", "build step")


def test_a_fault_names_a_scenario_and_a_mechanism_that_there_is() -> None:
    with pytest.raises(UsageError, match="at least one"):
        register_fault(replace(FAULT, id="mine", scenario_axes=()))
    with pytest.raises(UsageError, match="stale-copy"):
        register_fault(replace(FAULT, id="mine", mechanism="wrong"))
    with pytest.raises(UsageError, match=r"boundary\."):
        register_fault(replace(FAULT, id="boundary.mine"))
    with pytest.raises(UsageError, match=r"boundary\."):
        register_boundary_fault(replace(STRIKE, id="mine"))


def test_a_plugins_faults_are_planted_with_their_controls_and_explained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardproof", "faults", "--plugin", "tests.unit.planted_plugin", "-j", "1"]
    command += ["--out", str(tmp_path), "--json", str(tmp_path / "faults.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == ExitStatus.HARNESS, done.stderr
    rows = {row["id"]: row for row in json.loads((tmp_path / "faults.json").read_text("utf-8"))["faults"]}
    assert set(rows) == {"plugin-doubled", "plugin-harmless", "plugin-refusing"}
    assert (rows["plugin-doubled"]["operation"], rows["plugin-doubled"]["top1"]) == ("2 save", True)
    assert rows["plugin-refusing"]["verdicts"] == ["crash"]
    assert (rows["plugin-harmless"]["detected"], rows["plugin-harmless"]["effect"]) == (False, False)
    assert "HAD NO EFFECT: plugin-harmless" in done.stdout
    assert "NOT NOTICED" not in done.stdout
    assert "without it pass" in done.stdout
    assert "PermissionError: no sharded today" in done.stdout
