"""Each defect found in Megatron-FSDP sits where we say: a few lines there, and its regressions pass.

*Verifies*: with the patch of `tests/patches/`, every scenario of a defect passes; that without it they fail is
test_regressions.py's. *Does not verify*: that a patch is how upstream should repair it.
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
from harness.systems.megatron_fsdp import INFO
from harness.verdict import Verdict
from harness.world.environments import Environments

pytestmark = pytest.mark.real

RELEASE = "0.6.1"
PATCHES = Path(__file__).parents[1] / "patches"
REGRESSIONS = Path(__file__).parents[2] / "scenarios" / "regressions"
MOST_LINES = 16
"""A patch adds and removes no more lines than that."""

CURES: Mapping[str, tuple[str, ...]] = {
    "5976": ("5976", "5976-momentum"),
    "average-in-collective": ("average-in-collective",),
    "clip-empty-rank": ("clip-empty-rank", "scaler-empty-rank"),
    "frozen-no-overlap": ("frozen-no-overlap",),
    "hybrid-replicate": ("hybrid-replicate",),
    "mixed-unit-replicate": ("mixed-unit-replicate",),
    "mixed-unit-scale": ("mixed-unit-scale",),
    "no-tp-dim": ("no-tp-dim",),
    "one-call-groups": ("one-call-groups",),
    "one-rank-shard": ("one-rank-shard",),
    "outer-optim-scale": ("outer-optim-scale",),
    "overlap-gather-stale": ("overlap-gather-stale",),
    "overlap-reduce-twice": ("overlap-reduce-twice",),
    "ragged-unit": ("ragged-unit",),
    "replicate-tp": ("replicate-tp",),
    "rowwise-tp": ("rowwise-tp",),
}
"""Patch → the regressions that it turns green; `megatron-fsdp-` before each name left out."""

BESIDE: Mapping[str, str] = {"frozen-no-overlap": "overlap-reduce-twice"}
"""Patch → the one of another defect that the same scenario meets as well."""


def patch_of(name: str) -> str:
    return (PATCHES / f"megatron-fsdp-{name}.patch").read_text()


def test_every_patch_is_small_and_has_an_entry() -> None:
    assert {path.stem.removeprefix("megatron-fsdp-") for path in PATCHES.glob("megatron-fsdp-*.patch")} == CURES.keys()
    for name in CURES:
        lines = [
            line for line in patch_of(name).splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
        ]
        assert len(lines) <= MOST_LINES, name


@pytest.fixture(scope="module")
def opened() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=60.0) as laboratory:
        yield laboratory


@pytest.mark.nightly
@pytest.mark.parametrize("name", CURES)
def test_a_few_lines_cure_it(name: str, opened: Laboratory, tmp_path: Path) -> None:
    library = next(p for p in Environments(None, ()).overlay(INFO, RELEASE).paths if (p / "megatron_fsdp").is_dir())
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(library / "megatron_fsdp", tmp_path / "megatron_fsdp", ignore=ignored)
    command = ["patch", "--silent", "-p1", "--no-backup-if-mismatch", "-d", str(tmp_path)]
    for each in (name, *([BESIDE[name]] if name in BESIDE else [])):
        subprocess.run(command, input=patch_of(each), text=True, check=True)
    for each in CURES[name]:
        file = REGRESSIONS / f"megatron-fsdp-{each}.toml"
        cured = replace(Scenario.from_toml(file.read_text(), file.name), version=f"path:{tmp_path}")
        result = opened.examine_one(cured)
        assert result.verdict is Verdict.PASS, f"{each}: {result.signature or result.reason or result.verdict.value}"
