"""FSDP2 and DCP of another torch than the installed one, from the package index. Nightly, since it downloads 0.9 GB."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shardproof.laboratory.laboratory import Laboratory
from shardproof.scenario import Scenario
from shardproof.space.files import load_space
from shardproof.verdict import Verdict

pytestmark = pytest.mark.nightly
NEWEST = "2.15.0"


def test_the_newest_torch_keeps_what_the_installed_one_keeps() -> None:
    """A scenario that passes, and a defect that is in both, with the release that really ran in its result."""
    (kept,) = load_space("regressions/torch-fsdp2-164929").scenarios
    with Laboratory(jobs=1, deadline_s=60.0, systems={"torch-fsdp2"}) as laboratory:
        found = laboratory.examine_one(replace(kept, version=NEWEST))
        passing = laboratory.examine_one(replace(kept, version=NEWEST, program="build step save step load step"))
        here = laboratory.examine_one(replace(kept, version=""))
        axes = {"system": "torch-fsdp2", "version": NEWEST, "load_version": "newest"}
        back = laboratory.examine_one(Scenario.from_axes(axes))
    assert (found.verdict, passing.verdict) == (Verdict.MISMATCH, Verdict.PASS)
    assert found.version.partition("+")[0] == NEWEST != here.version.partition("+")[0]
    assert found.signature == here.signature
    assert (back.version, back.loaded_by) == (found.version, here.version), "without a number it is the installed one"
