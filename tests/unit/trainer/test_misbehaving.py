"""Trainers that misbehave: which of them are judged all the same, and what is said of the others and by whose fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shardproof.trainer.rank.warm import at_most

from tests.paths import PYTHONPATH, ROOT


def endless() -> None:
    with at_most(0.05, "the import of mine.py"):
        while True:
            pass


def test_an_import_that_does_not_end_is_ended() -> None:
    with pytest.raises(TimeoutError, match=r"the import of mine\.py has not ended after 0 s"):
        endless()


def test_what_ends_in_time_is_left_alone() -> None:
    with at_most(60.0, "this"):
        pass


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the command says of each way to misbehave; the file is run once."""
    folder = tmp_path_factory.mktemp("misbehaves")
    written = folder / "found.json"
    command = [sys.executable, "-m", "shardproof", "trainer", str(ROOT / "tests/trainers/misbehaves.py"), "--out",
               str(folder / "out"), "--json", str(written), "-j", "2", "-q", "--deadline-s", "20"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    subprocess.run(command, env=environment, cwd=folder, timeout=300, capture_output=True, check=False)
    found = json.loads(written.read_text("utf-8"))["results"]
    return {(dict(each["scenario"]).get("options") or "what=prints").removeprefix("what="): each for each in found}


@pytest.mark.real
@pytest.mark.parametrize("what", ["prints", "forks", "sets_signals"])
def test_what_disturbs_nobody_passes(results: dict[str, dict[str, Any]], what: str) -> None:
    assert results[what]["verdict"] == "pass"


@pytest.mark.real
@pytest.mark.parametrize(
    ("what", "verdict", "arm", "sentence"),
    [
        ("exits", "crash", "uninterrupted", "SystemExit on rank 0 in step (misbehaves.py, line "),
        ("raises", "crash", "uninterrupted", "ZeroDivisionError on rank 0 in step (misbehaves.py, line "),
        ("raises_in_state", "crash", "uninterrupted", "KeyError on rank 0 in state (misbehaves.py, line "),
        ("no_state", "unknown", "uninterrupted", "Nothing with state was found on the trainer after `build`"),
        ("writes_outside", "mismatch", "written", "The folder that `save` was given is empty: it wrote somewhere else"),
        ("refuses_late", "unsupported", "uninterrupted", "no such step"),
    ],
)
def test_what_cannot_be_judged_is_told(
    results: dict[str, dict[str, Any]], what: str, verdict: str, arm: str, sentence: str
) -> None:
    failing = {each["name"]: each["sentence"] for each in results[what]["arms"] if each["verdict"] != "pass"}
    assert results[what]["verdict"] == verdict
    assert failing[arm].startswith(sentence)


@pytest.mark.real
def test_a_module_of_the_user_that_cannot_be_imported_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"import helper_of_mine\n{(ROOT / 'tests/trainers/misbehaves.py').read_text()}")
    (tmp_path / "helper_of_mine.py").write_text("undefined\n")
    command = [sys.executable, "-m", "shardproof", "trainer", "mine.py", "--set", "what=prints", "--out", "out", "-q"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    ran = subprocess.run(command, env=environment, cwd=tmp_path, timeout=300, capture_output=True, check=False)
    assert ran.returncode == 2
    assert b"NameError in helper_of_mine.py, line 1: name 'undefined' is not defined" in ran.stderr
