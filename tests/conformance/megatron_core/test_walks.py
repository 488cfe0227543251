"""How walks go over Megatron-Core: the nightly and the weekly leave out nothing that they do not say."""

from __future__ import annotations

import pytest
from shardproof.program import PROGRAMS
from shardproof.scenario import LOAD_RELATIONS, Mesh
from shardproof.space.files import Walk, load_space
from shardproof.systems.megatron_core import SYSTEM
from shardproof.systems.megatron_core.formats import FORMATS
from shardproof.systems.reference import SYSTEM as REFERENCE

SHOWN_HERE = {"gpt", "lr_groups", "moe", "sandwich"}
"""Models that are walked here and not with every system: its own layers, or what shows its defects."""

OF_THE_REFERENCE = {model.name for model in REFERENCE.models}
"""Models that the reference brings, of what it alone keeps."""

SPLIT = {"gated", "gdn"}
"""Models whose parameters only the format of Megatron-FSDP takes apart: the walk of that has them."""

FOREIGN = {"nightly": {"fsdp_dtensor", "fully_sharded_model_space"}, "weekly": {"fsdp_dtensor"}}
"""Formats left out: one is Megatron-FSDP's, which has a walk of its own; the other raises at every save of the newest
release."""


def walks(name: str) -> tuple[Walk, Walk]:
    """Those with DDP and with Megatron-FSDP."""
    own = {walk.part: walk for walk in load_space(name).walks if walk.system == SYSTEM.name}
    assert own.keys() == {"", "fsdp", "no_shard", "upgrade", "streams", "constant", "switched"}
    return own[""], own["fsdp"]


ANOTHER_LOOP = {
    "unfreeze", "add_group", "optimizer_only", "pending", "pending_first", "accumulation", "recall", "schedule_only",
    "replace", "save_kept", "async_steps",
}  # fmt: skip
"""Programs that need a training loop of one's own, which Megatron-Core's scenarios have not."""


@pytest.mark.parametrize("name", ["nightly", "weekly"])
def test_no_model_program_relation_or_format_is_left_out(name: str) -> None:
    walk, under_fsdp = walks(name)
    (reference,) = (w for w in load_space(name).walks if (w.system, w.part) == ("reference", ""))
    assert {"dtype", "mesh", "offload"} <= set(walk.exhaustive)
    assert set(walk.axes["load"]) == set(LOAD_RELATIONS)
    cannot_unfreeze = {"later"}
    not_tried = {"hollow", "lone", "scalars"}
    everywhere = set(reference.axes["model"]) - OF_THE_REFERENCE - SPLIT
    assert set(walk.axes["model"]) == (everywhere | SHOWN_HERE) - cannot_unfreeze - not_tried
    assert set(under_fsdp.axes["model"]) >= SPLIT
    assert set(walk.axes["program"]) == set(PROGRAMS) - ANOTHER_LOOP
    assert {text.partition("+")[0] for text in walk.axes["checkpoint"]} == set(FORMATS) - FOREIGN[name]
    assert set(under_fsdp.axes["checkpoint"]) == {"fsdp_dtensor"}


@pytest.mark.parametrize("name", ["nightly", "weekly"])
def test_every_world_up_to_8_both_tensor_parallel_sizes_and_instances_are_walked(name: str) -> None:
    walk, _ = walks(name)
    chosen = [Mesh.parse(text) for text in walk.axes["mesh"]]
    worlds = {mesh.world for mesh in chosen if mesh.tp == 1}
    assert worlds == set(range(1, 9 if name == "weekly" else 8))
    assert {mesh.tp for mesh in chosen} == {1, 2}
    assert {mesh.dp_replicate for mesh in chosen} >= {1, 2}
