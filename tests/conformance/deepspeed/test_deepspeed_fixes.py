"""Each defect found in DeepSpeed sits where we say: a few lines there, and its regressions pass.

*Verifies*: with the patch of `patches/`, every scenario of a defect passes; that without it they fail is
test_regressions.py's. *Does not verify*: that a patch is how upstream should repair it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.systems.deepspeed import SYSTEM
from harness.verdict import Verdict
from tests.conformance.deepspeed import RELEASE
from tests.conformance.patched import changed_lines, patched, patches_of, regression

pytestmark = pytest.mark.real

MOST_LINES = 20
"""A patch adds and removes no more lines than that."""

CURES: Mapping[str, tuple[str, ...]] = {
    "module-only-3": ("module-only-3",),
    "offload-overflow": ("offload-overflow",),
    "resting-3": ("resting-3", "resting-3-late"),
    "resting-offload": ("resting-offload", "resting-offload-late"),
    "scale-growth": ("scale-growth", "scale-growth-clip", "scale-growth-3"),
    "universal-empty-part": ("universal-empty-part",),
    "universal-frozen": ("universal-frozen",),
    "universal-groups-3": ("universal-groups-3",),
}
"""Patch → the regressions that it turns green."""


def test_every_patch_is_small_and_has_an_entry() -> None:
    assert set(patches_of(SYSTEM)) == CURES.keys()
    assert all(changed_lines(SYSTEM, name) <= MOST_LINES for name in CURES)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CURES)
def test_a_few_lines_cure_it(name: str, laboratory: Laboratory, tmp_path: Path) -> None:
    version = patched(SYSTEM, RELEASE, [name], tmp_path)
    for each in CURES[name]:
        result = laboratory.examine_one(replace(regression(SYSTEM, each), version=version))
        assert result.verdict is Verdict.PASS, (each, result.signature, result.reason, result.error)
