"""Each defect found in Megatron-FSDP sits where we say: a few lines there, and its regressions pass.

*Verifies*: with the patch of `patches/`, every scenario of a defect passes; that without it they fail is
test_regressions.py's. *Does not verify*: that a patch is how upstream should repair it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.laboratory import Laboratory
from harness.systems.megatron_fsdp import SYSTEM
from harness.verdict import Verdict
from tests.conformance.megatron_fsdp import RELEASE
from tests.conformance.patched import changed_lines, patched, patches_of, regression

pytestmark = pytest.mark.real

MOST_LINES = 16
"""A patch adds and removes no more lines than that."""

CURES: Mapping[str, tuple[str, ...]] = {
    "5976": ("5976", "5976-momentum"),
    "average-in-collective": ("average-in-collective",),
    "clip-empty-rank": ("clip-empty-rank", "scaler-empty-rank"),
    "clip-tp-mesh": ("clip-tp-mesh",),
    "frozen-no-overlap": ("frozen-no-overlap",),
    "fused-adam-save": ("fused-adam-save",),
    "hybrid-replicate": ("hybrid-replicate",),
    "main-grads-dtype": ("main-grads-dtype",),
    "meta-tied": ("meta-tied",),
    "meta-tp": ("meta-tp",),
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
    "step-syncs": ("step-syncs",),
}
"""Patch → the regressions that it turns green."""

BESIDE: Mapping[str, str] = {"frozen-no-overlap": "overlap-reduce-twice"}
"""Patch → the one of another defect that the same scenario meets as well."""


def test_every_patch_is_small_and_has_an_entry() -> None:
    assert set(patches_of(SYSTEM)) == CURES.keys()
    assert all(changed_lines(SYSTEM, name) <= MOST_LINES for name in CURES)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CURES)
def test_a_few_lines_cure_it(name: str, laboratory: Laboratory, tmp_path: Path) -> None:
    names = [name, *([BESIDE[name]] if name in BESIDE else [])]
    version = patched(SYSTEM, RELEASE, names, tmp_path)
    for each in CURES[name]:
        result = laboratory.examine_one(replace(regression(SYSTEM, each), version=version))
        assert result.verdict is Verdict.PASS, f"{each}: {result.signature or result.reason or result.verdict.value}"
