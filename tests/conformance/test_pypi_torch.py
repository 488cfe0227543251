"""Where users are: an environment made afresh from PyPI's wheels, in which smoke must say what it says here.

`pip install torch` gives a CUDA build on Linux. Nightly: 5 GB are downloaded, or taken from pip's cache. What CI runs
in their place are `tests/unit/world/test_rehearsal.py` and smoke itself, on whatever build CI has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.stub_libraries import write_stubs

pytestmark = [pytest.mark.nightly, pytest.mark.real]

ROOT = Path(__file__).parents[2]
ORDINARY = {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""What keeps a machine's own pip settings, such as a folder with a CPU build, out of it."""


def verdicts(python: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Scenario → verdict and what is known of it, of a smoke run in an interpreter."""
    report = folder / "run.json"
    done = subprocess.run(
        [python, "-m", "shardproof", "run", "smoke", "--out", folder, "--json", report],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return told(json.loads(report.read_text()))


def told(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {result["id"]: (result["verdict"], result["known_issue"]) for result in document["results"]}


def pip(python: Path, *words: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *words], env={**os.environ, **ORDINARY}, check=True)


@pytest.fixture(scope="module")
def here(smoke: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return told(smoke)


@pytest.mark.parametrize("stack", ["nvidia", "stand-ins"])
def test_smoke_on_pypis_torch_is_smoke_here(tmp_path: Path, here: dict[str, tuple[str, str]], stack: str) -> None:
    """With the `nvidia-*` packages that torch asks for, and without them, over stand-ins for their libraries."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pinned = [line for line in (ROOT / "constraints.txt").read_text().split() if not line.startswith("torch==")]
    release = version("torch").partition("+")[0]
    pip(python, *(["--no-deps"] if stack == "stand-ins" else []), f"torch==={release}")
    pip(python, "--no-deps", *pinned)
    if stack == "stand-ins":
        (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        assert write_stubs(site / "torch", site / "nvidia" / "cu13" / "lib")
    assert verdicts(python, tmp_path / "out") == here
