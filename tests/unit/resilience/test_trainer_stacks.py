"""`shardproof resilience FILE.py`: what crashes and damage make of the checkpoints of a trainer.

*Verifies*: a trainer that writes a file anew over the last one can lose both, one that writes beside it and renames
cannot; refusals of what is no trainer's axis. *Does not verify*: each kind of trial (`test_resilience_runs`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import PYTHONPATH, ROOT

TRAINER = str(ROOT / "tests/trainers/saves_variously.py")


def asked(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardproof", "resilience", TRAINER, "--out", str(folder), *words]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, cwd=ROOT, timeout=400, capture_output=True, text=True, check=False)


def test_an_axis_that_the_trainer_has_not_is_refused(tmp_path: Path) -> None:
    done = asked(tmp_path, "--set", "x=1")
    assert done.returncode == 2
    assert "given 'x'; allowed: how, mesh" in done.stderr


def test_an_axis_of_a_stack_that_is_no_trainer_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardproof", "resilience", "torch-save", "--set", "how=atomic"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "trainer" in done.stderr


@pytest.mark.real
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("how", "mixed"), [("atomic", False), pytest.param("two_files", True, marks=pytest.mark.nightly)]
)
def test_a_crash_between_two_files_mixes_two_checkpoints(how: str, mixed: bool, tmp_path: Path) -> None:
    done = asked(tmp_path, "--set", f"how={how}", "--set", "mesh=1", "--trials", "40")
    assert done.returncode == 1, done.stdout + done.stderr  # a flipped bit of a payload is read in silence
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text("utf-8").splitlines()]
    killed = {line["outcome"] for line in lines if line.get("kind") == "killed"}
    assert {"old", "new"} <= killed
    assert ("silent" in killed) is mixed
