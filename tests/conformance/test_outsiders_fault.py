"""A boundary fault that a plugin brings strikes real ranks of a library that knows nothing of it, is noticed where it
strikes, and is told apart from one that never struck."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shardproof.laboratory.run_verdict import NEVER_STRUCK
from shardproof.scenario import Scenario

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


def ran(folder: Path, program: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the one result, of the plugin's fault in a program on two ranks of FSDP2."""
    scenario = Scenario.from_axes({
        "system": "torch-fsdp2", "mesh": "1x2x1", "program": program, "faults": "boundary.left-as-it-was",
    })  # fmt: skip
    file = folder / "mine.toml"
    file.write_text(scenario.to_toml(), "utf-8")
    command = [
        sys.executable, "-m", "shardproof", "run", str(file), "--plugin", "tests.unit.striking_plugin",
        "--out", str(folder / "run"), "--json", str(folder / "run.json"),
    ]  # fmt: skip
    status = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode
    (result,) = json.loads((folder / "run.json").read_text("utf-8"))["results"]
    return status, result


def test_a_fault_of_a_plugin_is_noticed_on_the_rank_that_it_strikes(tmp_path: Path) -> None:
    status, result = ran(tmp_path, "build step save step load")
    assert (status, result["verdict"]) == (1, "mismatch")
    first = result["differences"][0]
    assert (first["role"], first["op_index"], first["kind"], first["ranks"]) == ("param", 4, "bits", [0])


@pytest.mark.nightly
def test_a_fault_of_a_plugin_that_finds_nothing_to_strike_has_had_no_effect(tmp_path: Path) -> None:
    _, result = ran(tmp_path, "build step save")
    assert result["verdict"] == "pass"
    assert result["reason"] == NEVER_STRUCK
