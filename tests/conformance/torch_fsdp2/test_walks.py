"""How walks go over FSDP2: the nightly and the weekly leave out nothing that they do not say."""

from __future__ import annotations

import pytest
from shardproof.mechanisms.fsdp2.formats import FORMATS
from shardproof.program import PROGRAMS
from shardproof.scenario import LOAD_RELATIONS
from shardproof.space.axis_values import meshes
from shardproof.space.files import load_space
from shardproof.systems.reference import SYSTEM as REFERENCE
from shardproof.systems.torch_fsdp2 import SYSTEM

FOR_WEEKLY = {
    "5x1x1", "1x1x5", "6x1x1", "1x1x6", "3x2x1", "2x1x3", "3x1x2", "1x2x3", "7x1x1", "1x1x7",
    "8x1x1", "1x1x8", "4x2x1", "4x1x2", "2x1x4", "1x2x4",
}  # fmt: skip
"""Meshes of five ranks and more that are slow on real ranks, and have a sibling in the nightly (docs/decisions.md)."""

OF_THE_REFERENCE = {model.name for model in REFERENCE.models} | {"moe"}
"""Models that the reference brings, of what it alone keeps; and experts, which FSDP2 does not spread over ranks."""

REFUSED = {"scalars"}
"""Models that FSDP2 refuses whatever else is asked for; `shardproof conformance` has it do so."""


@pytest.mark.parametrize("name", ["nightly", "weekly"])
def test_no_mesh_model_program_relation_or_format_is_left_out(name: str) -> None:
    walks = {walk.system: walk for walk in load_space(name).walks if not walk.part}
    walk, reference = walks[SYSTEM.name], walks["reference"]
    left_out = FOR_WEEKLY if name == "nightly" else set()
    assert set(walk.axes["mesh"]) == {str(mesh) for mesh in meshes(8)} - left_out
    assert set(walk.axes["model"]) == set(reference.axes["model"]) - OF_THE_REFERENCE - REFUSED - {"gated", "gdn"}
    assert set(walk.axes["program"]) == set(PROGRAMS)
    assert set(walk.axes["load"]) == set(LOAD_RELATIONS)
    options = {f"{form}+{option}" for form, each in FORMATS.items() for option in each if form in ("dcp", "full")}
    options -= {"dcp+ignore_frozen", "full+ignore_frozen"}  # which go with no_strict
    assert {*FORMATS, *options} <= set(walk.axes["checkpoint"])
