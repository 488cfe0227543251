"""Each defect of TransformerEngine's newest release sits where we say: a few lines there, and its regressions pass.

*Verifies*: with the patch of `tests/patches/` every scenario of a defect passes; without it, it does not (see
test_regressions.py). All of it is nightly.
*Does not verify*: that a patch is how upstream should repair it. The founding bug's is the storage half of what pull
request 2713 proposes: the layers' own forward would have to take the local tensors too.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.scenario import Scenario
from harness.systems.transformer_engine import INFO
from harness.verdict import Verdict
from harness.world.environments import Environments

pytestmark = pytest.mark.real

RELEASE = "2.20.2"
PATCHES = Path(__file__).parents[1] / "patches"
REGRESSIONS = Path(__file__).parents[2] / "scenarios" / "regressions"
MOST_LINES = 26

FIXES: Mapping[str, tuple[str, ...]] = {
    "2713": ("2713", "2713-a", "2713-attention", "2713-b", "2713-fused"),
    "capturable-groups": ("capturable-groups",),
    "fp32-master": ("fp32-master",),
    "scaled-empty": ("scaled-empty",),
    "scaled-load": ("scaled-load",),
    "tags-grouped": ("tags-grouped",),
    "tags-offset": ("tags-offset",),
}
"""Patch → the regressions that it cures; `transformer-engine-` before each name left out."""


def patch_of(name: str) -> str:
    return (PATCHES / f"transformer-engine-{name}.patch").read_text()


def regression(name: str) -> Scenario:
    file = REGRESSIONS / f"transformer-engine-{name}.toml"
    return Scenario.from_toml(file.read_text(), file.name)


def test_every_patch_is_small_and_has_an_entry() -> None:
    files = PATCHES.glob("transformer-engine-*.patch")
    assert {path.stem.removeprefix("transformer-engine-") for path in files} == FIXES.keys()
    for name in FIXES:
        changed = [line for line in patch_of(name).splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        assert len(changed) <= MOST_LINES, name


@pytest.fixture(scope="module")
def opened() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=60.0) as laboratory:
        yield laboratory


def patched(name: str, folder: Path) -> str:
    """The version text of a copy of the release with that patch."""
    place = Path("transformer_engine")
    library = next(p for p in Environments(None, ()).overlay(INFO, RELEASE).paths if (p / place).is_dir())
    shutil.copytree(library / place, folder / place, ignore=shutil.ignore_patterns("__pycache__", "jax"))
    command = ["patch", "--silent", "-p1", "--no-backup-if-mismatch", "-d", str(folder)]
    subprocess.run(command, input=patch_of(name), text=True, check=True)
    return f"path:{folder}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIXES)
def test_a_few_lines_cure_it(name: str, opened: Laboratory, tmp_path: Path) -> None:
    cured = patched(name, tmp_path / "cured")
    for each in FIXES[name]:
        result = opened.examine_one(replace(regression(each), version=cured))
        assert result.verdict is Verdict.PASS, f"{each}: {result.signature or result.reason}"
