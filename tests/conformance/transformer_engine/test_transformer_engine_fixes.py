"""Each defect of TransformerEngine's newest release sits where we say: a few lines there, and its regressions pass.

*Verifies*: with the patch of `patches/` every scenario of a defect passes; without it, it does not (see
test_regressions.py). All of it is nightly.
*Does not verify*: that a patch is how upstream should repair it. The founding bug's is the storage half of what pull
request 2713 proposes: the layers' own forward would have to take the local tensors too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.systems.transformer_engine import SYSTEM
from harness.verdict import Verdict
from tests.conformance.patched import changed_lines, patched, patches_of, regression
from tests.conformance.transformer_engine import RELEASE

pytestmark = pytest.mark.real

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
"""Patch → the regressions that it cures."""


def test_every_patch_is_small_and_has_an_entry() -> None:
    assert set(patches_of(SYSTEM)) == FIXES.keys()
    assert all(changed_lines(SYSTEM, name) <= MOST_LINES for name in FIXES)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIXES)
def test_a_few_lines_cure_it(name: str, laboratory: Laboratory, tmp_path: Path) -> None:
    cured = patched(SYSTEM, RELEASE, [name], tmp_path / "cured")
    for each in FIXES[name]:
        result = laboratory.examine_one(replace(regression(SYSTEM, each), version=cured))
        assert result.verdict is Verdict.PASS, f"{each}: {result.signature or result.reason}"
