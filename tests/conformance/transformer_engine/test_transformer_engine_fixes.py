"""Each defect of TransformerEngine's newest release sits where we say: a few lines there, and its regressions pass.

*Verifies*: with the patch of `tests/patches/` every scenario of a defect passes; without it, it does not (see
test_regressions.py). All of it is nightly.
*Does not verify*: that a patch is how upstream should repair it. The founding bug's is the storage half of what pull
request 2713 proposes: the layers' own forward would have to take the local tensors too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.scenario import Scenario
from harness.systems.transformer_engine import INFO
from harness.verdict import Verdict
from tests.conformance.patched import PATCHES, changed_lines, patched

pytestmark = pytest.mark.real

RELEASE = "2.20.2"
REGRESSIONS = Path(__file__).parents[2] / "scenarios" / "regressions"
MOST_LINES = 26

FIXES: Mapping[str, tuple[str, ...]] = {
    "2713": ("2713", "2713-a", "2713-attention", "2713-b", "2713-fused"),
    "2713-g": ("2713-g",),
    "capturable-groups": ("capturable-groups",),
    "fp32-master": ("fp32-master",),
    "fp8-uneven": ("fp8-uneven",),
    "scaled-empty": ("scaled-empty",),
    "scaled-load": ("scaled-load",),
    "tags-grouped": ("tags-grouped",),
    "tags-offset": ("tags-offset",),
}
"""Patch → the regressions that it cures; `transformer-engine-` before each name left out."""


def regression(name: str) -> Scenario:
    file = REGRESSIONS / f"transformer-engine-{name}.toml"
    return Scenario.from_toml(file.read_text(), file.name)


def test_every_patch_is_small_and_has_an_entry() -> None:
    files = PATCHES.glob("transformer-engine-*.patch")
    assert {path.stem.removeprefix("transformer-engine-") for path in files} == FIXES.keys()
    assert all(changed_lines(f"transformer-engine-{name}") <= MOST_LINES for name in FIXES)


@pytest.fixture(scope="module")
def opened() -> Iterator[Laboratory]:
    with Laboratory(jobs=1, deadline_s=60.0) as laboratory:
        yield laboratory


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIXES)
def test_a_few_lines_cure_it(name: str, opened: Laboratory, tmp_path: Path) -> None:
    cured = patched(INFO, RELEASE, "transformer_engine", [f"transformer-engine-{name}"], tmp_path / "cured")
    for each in FIXES[name]:
        result = opened.examine_one(replace(regression(each), version=cured))
        assert result.verdict is Verdict.PASS, f"{each}: {result.signature or result.reason}"
