"""Copies of a release with a system's patches applied: what the tests of repairs run.

The patches of a system lie in `patches/` beside its tests, each a few lines that cure one defect. So do the scenarios
of defects that no release can reach, since another defect ends them; all others are the system's regressions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.releases import package_of
from harness.scenario import Scenario
from harness.space.files import regression_file
from harness.systems.protocol import System
from harness.world.environments import Environments
from harness.world.overlay import clone_variable

HERE = Path(__file__).parent


def needs_clone(scenario: Scenario) -> None:
    """Skip a test of a commit where no clone of the library was named."""
    variable = clone_variable(scenario.system)
    if scenario.version.startswith("git:") and not os.environ.get(variable):
        pytest.skip(f"{scenario.version} of {scenario.system} needs a clone: {variable}")


def regression(system: System, name: str) -> Scenario:
    """The scenario of a regression, by what follows `regressions/<system>-`, or of one that lies beside its patch."""
    kept, beside = regression_file(system, name), folder_of(system) / f"{name}.toml"
    found = kept if kept.is_file() else beside
    return Scenario.from_toml(found.read_text("utf-8"), found.name)


def folder_of(system: System) -> Path:
    """Where a system's patches lie."""
    return HERE / system.name.replace("-", "_") / "patches"


def patches_of(system: System) -> list[str]:
    """The names of a system's patches."""
    return sorted(path.stem for path in folder_of(system).glob("*.patch"))


def patched(system: System, release: str, patches: Iterable[str], folder: Path) -> str:
    """The version text of a copy of a release in `folder` with patches applied, given by name."""
    top = package_of(system).tree.partition("/")[0]
    library = next(p for p in Environments(None, ()).overlay(system, release).paths if (p / top).is_dir())
    shutil.copytree(library / top, folder / top, ignore=shutil.ignore_patterns("__pycache__", "jax"))
    for name in patches:
        command = ["patch", "--silent", "-p1", "--no-backup-if-mismatch", "-d", str(folder)]
        patch = folder_of(system) / f"{name}.patch"
        subprocess.run(command, input=patch.read_text("utf-8"), text=True, check=True)
    return f"path:{folder}"


def changed_lines(system: System, name: str) -> int:
    """How many lines a patch adds and takes away."""
    lines = (folder_of(system) / f"{name}.patch").read_text("utf-8").splitlines()
    return sum(line[:1] in ("+", "-") and line[:3] not in ("+++", "---") for line in lines)
