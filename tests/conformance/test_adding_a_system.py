"""The worked example of docs/adding-a-system.md: a plugin, below the size that the page says, that can do what a
built-in system can.

*Verifies*: its scenarios pass, it conforms, and it shows a defect that is planted in it; installed as a distribution
with an entry point, and named on no command line, its system, format, model, program, walk, costs, known issue,
regression and rule of diagnosis are found by `list`, `plan`, `run` and `explain`.
*Does not verify*: a plugin's releases, which tests/unit/cli/test_cli_releases.py has (tests/unit/overlay_system.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shardproof.checks.conformance import check_system
from shardproof.errors import UsageError
from shardproof.laboratory.laboratory import Laboratory
from shardproof.program import PROGRAMS, named_programs, provide
from shardproof.protocol.system import System
from shardproof.scenario import Scenario
from shardproof.verdict import ExitStatus, Verdict

from tests.conformance import torch_zero
from tests.conformance.torch_zero import SYSTEM
from tests.conformance.torch_zero.elsewhere import OTHER_FILE, OTHER_KEY
from tests.conformance.torch_zero.forgetful import FORGETFUL
from tests.paths import PYTHONPATH

ROOT = Path(__file__).parents[2]
PACKAGE = Path(torch_zero.__file__).parent
BASE = Scenario(system=SYSTEM.name, sharding="zero1", checkpoint="consolidated").with_axes({"mesh": "1x2x1"})
MOST_LINES = 400


@pytest.mark.real
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"model": "groups", "mesh": "1x3x1", "optimizer": "adamw/clip=1.0", "load": "shrink"},
        {"model": "tied", "optimizer": "sgd/momentum=0.9", "program": "rollback", "dtype": "bf16"},
        {"model": "frozen_tower", "program": "overflow", "optimizer": "adamw/loss_scale=1024.0", "microbatches": "2"},
        {"model": "ladder", "mesh": "1x3x1", "program": "relay"},
    ],
    ids=str,
)
def test_it_passes(laboratory: Laboratory, axes: dict[str, str]) -> None:
    result = laboratory.examine_one(BASE.with_axes(axes))
    assert result.verdict is Verdict.PASS, (result.signature, result.reason, result.error)


@pytest.mark.real
def test_it_conforms(laboratory: Laboratory) -> None:
    found = list(check_system(SYSTEM, laboratory))
    assert [check.line for check in found if check.wrong or check.skipped] == []


@pytest.mark.real
def test_a_load_that_forgets_the_optimizer_is_seen(laboratory: Laboratory) -> None:
    result = laboratory.examine_one(replace(BASE, system=FORGETFUL.name))
    assert result.verdict is Verdict.MISMATCH, (result.signature, result.reason, result.error)


@pytest.mark.real
@pytest.mark.parametrize(
    ("system", "missing"),
    [(OTHER_FILE, "file .metadata: given 'none'"), (OTHER_KEY, "section: given 'state_dict'; allowed: model, optim")],
    ids=["file", "key"],
)
def test_a_checkpoint_that_nobody_here_reads_is_no_failure_of_the_library(
    laboratory: Laboratory, system: System, missing: str
) -> None:
    result = laboratory.examine_one(replace(BASE, system=system.name))
    assert (result.verdict, result.differences) == (Verdict.UNKNOWN, ())
    assert result.reason.startswith("our reader does not know this form of checkpoint: checkpoint")
    assert missing in result.reason


def test_a_program_has_one_meaning() -> None:
    provide("relay", named_programs()["relay"])
    with pytest.raises(UsageError, match="program 'relay': given 'build step'"):
        provide("relay", "build step")
    with pytest.raises(UsageError, match="comes before a build"):
        provide("headless", "step")
    assert "headless" not in named_programs()
    assert "relay" not in PROGRAMS, "those that ship"


def test_it_is_of_the_size_that_the_page_says() -> None:
    files = [path for path in PACKAGE.glob("*.py") if not path.name.startswith(("forgetful", "elsewhere"))]
    assert {path.stem for path in files} == {"__init__", "accepts", "contract", "stored", "rank", "models", "rules"}
    assert sum(len(path.read_text().splitlines()) for path in files) < MOST_LINES
    default = Scenario(system=SYSTEM.name)
    assert {limit.id for limit in SYSTEM.accepts.limits if limit.refuses(default)} == {"sharding", "checkpoint"}
    assert SYSTEM.refusal(BASE) is None


# Installed


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on no path of ours with the package as a distribution that names it in its entry points."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(
        PACKAGE, site / "zero_plugin", ignore=shutil.ignore_patterns("__pycache__", "forgetful*", "elsewhere*")
    )
    info = site / "zero_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zero-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardproof.plugins]\ntorch-zero = zero_plugin\n")
    return site


def shardproof(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command with the distribution installed, in a folder that has nothing of it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), PYTHONPATH])}
    command = [sys.executable, "-m", "shardproof", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_what_is_installed_is_listed(installed: Path, tmp_path: Path) -> None:
    told = shardproof(installed, tmp_path, "list")
    assert told.returncode == ExitStatus.OK, told.stderr
    for line in (
        "  torch-zero          PyTorch ZeroRedundancyOptimizer and DistributedDataParallel, unmodified",
        "  torch-zero          consolidated",
        "  ladder          Parameters of very different size",
        "  relay            build step save restart build load step save restart build load step",
        "  regressions/torch-zero-unfreeze",
        "  gradients are averaged over all ranks in the storage dtype",
    ):
        assert " ".join(line.split()) in " ".join(told.stdout.split()), told.stdout


def test_its_walk_is_planned_with_its_costs(installed: Path, tmp_path: Path) -> None:
    told = shardproof(installed, tmp_path, "plan", "smoke", "--system", SYSTEM.name)
    assert told.returncode == ExitStatus.OK, told.stderr
    assert "11 scenarios" in told.stdout
    assert "about 6 s of 60 s" in told.stdout  # 24 s at what a system without costs is estimated
    assert "ladder 3" in told.stdout
    assert "relay 4" in told.stdout


@pytest.mark.nightly
@pytest.mark.real
def test_its_walk_runs_and_what_it_knows_is_known(installed: Path, tmp_path: Path) -> None:
    told = shardproof(installed, tmp_path, "run", "smoke", "--system", SYSTEM.name, "-j", "1", "--json", "run.json")
    assert told.returncode == ExitStatus.OK, told.stdout + told.stderr
    results = json.loads((tmp_path / "run.json").read_text())["results"]
    assert {"ladder", "later"} <= {result["scenario"].get("model") for result in results}
    assert "relay" in {result["scenario"].get("program") for result in results}
    assert {result["verdict"] for result in results} == {"pass", "mismatch"}
    known = [result for result in results if result["verdict"] == "mismatch"]
    assert {result["known_issue"] for result in known} == {"torch-zero-unfreeze"}
    assert all("unfrozen_after_wrapping" in {e["mechanism"] for e in result["explanations"]} for result in known)
    explained = shardproof(installed, tmp_path, "explain", known[0]["id"])
    assert explained.returncode == ExitStatus.OK, explained.stderr
    assert "is in none of its buckets" in explained.stdout


def test_its_regression_has_a_name(installed: Path, tmp_path: Path) -> None:
    told = shardproof(installed, tmp_path, "plan", "regressions/torch-zero-unfreeze")
    assert told.returncode == ExitStatus.OK, told.stderr
    assert told.stdout.startswith("1 scenario")


def test_without_it_nothing_of_it_is_known(tmp_path: Path) -> None:
    told = shardproof(tmp_path, tmp_path, "plan", "smoke", "--system", SYSTEM.name)
    assert told.returncode == ExitStatus.USAGE
    assert "torch-zero" in told.stderr
