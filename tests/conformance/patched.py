"""Copies of a release with patches of tests/patches applied: what the tests of repairs run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.scenario import Scenario
from harness.systems.protocol import SystemInfo
from harness.world.environments import Environments
from harness.world.overlay import clone_variable

PATCHES = Path(__file__).parents[1] / "patches"


def needs_clone(scenario: Scenario) -> None:
    """Skip a test of a commit where no clone of the library was named."""
    variable = clone_variable(scenario.system)
    if scenario.version.startswith("git:") and not os.environ.get(variable):
        pytest.skip(f"{scenario.version} of {scenario.system} needs a clone: {variable}")


def patched(info: SystemInfo, release: str, package: str, patches: Iterable[str], folder: Path) -> str:
    """The version text of a copy of a release. package: its top-level folder. patches: files, without their suffix."""
    library = next(p for p in Environments(None, ()).overlay(info, release).paths if (p / package).is_dir())
    shutil.copytree(library / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "jax"))
    for name in patches:
        command = ["patch", "--silent", "-p1", "--no-backup-if-mismatch", "-d", str(folder)]
        subprocess.run(command, input=(PATCHES / f"{name}.patch").read_text(), text=True, check=True)
    return f"path:{folder}"


def changed_lines(name: str) -> int:
    """How many lines a patch adds and takes away."""
    lines = (PATCHES / f"{name}.patch").read_text().splitlines()
    return sum(line[:1] in ("+", "-") and line[:3] not in ("+++", "---") for line in lines)
