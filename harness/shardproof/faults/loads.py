"""Faults of saving and loading that leave something out or refuse sound input, such as a loader that demands a key
which no save writes.

Each replaces seams of the reference by a mistake that a library made (`shardproof.faults.logical` has the tools).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardproof.faults.logical import nothing, override

if TYPE_CHECKING:
    from shardproof.reference.checkpoint import Content, Logical
    from shardproof.reference.numerics import Array
    from shardproof.reference.state import Shards
    from shardproof.reference.system import Ranks


def optimizer_not_loaded(ranks: Ranks) -> None:
    """Take the template of the optimizer's state for what was loaded."""
    override(ranks.loader, "restore_optimizer", nothing)


def first_optimizer_saved(ranks: Ranks) -> None:
    """Save the state of the first optimizer of several."""

    def save(form: str) -> Content:
        content: Content = original(form)
        first = set(ranks.session.groups[0].names)
        for filed in (content.get("full", {}), *content.get("ranks", {}).values()):
            for role in set(filed) - {"param"}:
                filed[role] = {key: held for key, held in filed[role].items() if key.partition(":")[0] in first}
        steps = content["common"]["steps"]
        content["common"]["steps"] = {name: step for name, step in steps.items() if name in first}
        return content

    original = override(ranks.saver, "save", save)


def state_wanted_under_aliases(ranks: Ranks) -> None:
    """Look up the state of a tied parameter under all of its names, of which one was saved."""

    def restore_optimizer(logical: Logical, common: Content) -> None:
        for names in ranks.session.catalogue.names.values():
            for name in names if names[0] in common["steps"] else ():
                common["steps"][name]
        original(logical, common)

    original = override(ranks.loader, "restore_optimizer", restore_optimizer)


def state_wanted_of_unused(ranks: Ranks) -> None:
    """Want the state of every trainable parameter, also of those that never had a gradient."""

    def restore_optimizer(logical: Logical, common: Content) -> None:
        for name in sorted(ranks.session.trainable):
            common["steps"][name]
        original(logical, common)

    original = override(ranks.loader, "restore_optimizer", restore_optimizer)


def full_state_left_whole(ranks: Ranks) -> None:
    """Leave moments that were loaded whole as they are, instead of cutting out each rank's share."""

    def take(shards: Shards, role: str, tensors: dict[str, Array], dtype: str) -> Array:
        own: Array = original(shards, role, tensors, dtype)
        if role == "master":
            return own
        whole = np.zeros((*own.shape[:2], shards.layout.element.size), own.dtype)
        whole[..., : own.shape[2]] = own
        return whole

    original = override(ranks.loader, "take", take)


def empty_shares_wanted(ranks: Ranks) -> None:
    """Want every tensor in every rank's file, although a writer leaves out those of which a rank owns nothing."""

    def read(content: Content) -> Logical:
        wanted = list(ranks.session.model.unique_params)
        for filed in content.get("ranks", {}).values():
            for param in wanted:
                filed["param"][param.fqn]
        logical: Logical = original(content)
        return logical

    original = override(ranks.loader, "read", read)


def template_of_a_fresh_module(ranks: Ranks) -> None:
    """Load a module's own bytes into as many as a fresh module has."""

    def restore_opaque(opaque: dict[str, bytes]) -> None:
        for name, own in ranks.session.opaque.items():
            template = np.zeros(len(own), np.uint8)
            template[...] = np.frombuffer(opaque[name], np.uint8)
        original(opaque)

    original = override(ranks.loader, "restore_opaque", restore_opaque)


def empty_bytes_decoded(ranks: Ranks) -> None:
    """Decode a module's own bytes for a save as if there always were some."""

    def opaque_bytes() -> dict[str, bytes]:
        found: dict[str, bytes] = original()
        return {name: bytes([data[0]]) + data[1:] for name, data in found.items()}

    original = override(ranks.saver, "opaque_bytes", opaque_bytes)


def padding_marker_as_state(ranks: Ranks) -> None:
    """Leave the mark that says whether a share is padded among the tensors of the state."""

    def read(content: Content) -> Logical:
        marked = {
            tp: {
                storage: {
                    bucket: {rank: {**held, "padding": np.True_} for rank, held in shares.items()}
                    for bucket, shares in buckets.items()
                }
                for storage, buckets in by_storage.items()
            }
            for tp, by_storage in content.get("buckets", {}).items()
        }
        logical: Logical = original({**content, **({"buckets": marked} if marked else {})})
        return logical

    original = override(ranks.loader, "read", read)


def views_refuse_a_copy(ranks: Ranks) -> None:
    """Hold fp32 parameters as views that must not be written in place, beside masters that may."""

    def restore_masters(logical: Logical) -> None:
        has_masters = any(shards.stages.master is not None for shards in ranks.session.shards)
        for shards in ranks.session.shards:
            if has_masters and shards.stages.master is None:
                view = shards.stepped.view()
                view.setflags(write=False)
                view[...] = 0
        original(logical)

    original = override(ranks.loader, "restore_masters", restore_masters)


def masters_wanted_of_all(ranks: Ranks) -> None:
    """Look up the master of every parameter, also of those that are stepped as they are."""

    def restore_masters(logical: Logical) -> None:
        masters = {p.fqn: p.fqn for p in ranks.session.of_build.parameters if p.stages.master is not None}
        for name in sorted(ranks.session.held) if ranks.session.placement.offload else ():
            masters[name]
        original(logical)

    original = override(ranks.loader, "restore_masters", restore_masters)


def keyed_by_identity(ranks: Ranks) -> None:
    """Key an offloading optimizer's maps by the model's parameters, whose place masters have taken since."""

    def update() -> None:
        session = ranks.session
        known = {id(shards.stepped if shards.stages.master is None else shards.model) for shards in session.shards}
        for shards in session.shards if session.placement.offload else ():
            if id(shards.stepped) not in known:
                raise KeyError(f"parameter at {shards.layout.slots[0].param.fqn}: none of the {len(known)} known ones")
        original()

    original = override(ranks.trainer, "update", update)


def names_matched_within(ranks: Ranks) -> None:
    """Match a module with every key of a checkpoint in which its name occurs."""

    def restore_model(logical: Logical, content: Content) -> None:
        model = ranks.session.model
        for module in model.modules:
            found = {model.param(key).module.path for key in logical["param"] if module.path in key}
            if len(found) > 1:
                raise ValueError(f"{module.path} matches the keys of {sorted(found)}; one was expected")
        original(logical, content)

    original = override(ranks.loader, "restore_model", restore_model)


def gathered_over_the_world(ranks: Ranks) -> None:
    """Gather the state over all ranks into a list that has room for those of one replica."""

    def save(form: str) -> Content:
        mesh = ranks.session.mesh
        gathered = [False] * mesh.dp_shard
        for rank in range(mesh.dp):
            gathered[rank] = True
        content: Content = original(form)
        return content

    original = override(ranks.saver, "save", save)


def units_without_state_counted(ranks: Ranks) -> None:
    """Find a unit's state by its number among all units, although those without state have none in the list."""

    def restore_optimizer(logical: Logical, common: Content) -> None:
        model = ranks.session.model
        saved = list(dict.fromkeys(model.param(name).module.path for name in common["steps"]))
        for number, module in enumerate(model.modules):
            if module.path in saved and saved[number] != module.path:
                raise ValueError(f"state of unit {number}, {module.path}, is that of {saved[number]}")
        original(logical, common)

    original = override(ranks.loader, "restore_optimizer", restore_optimizer)


def step_left_on_the_host(ranks: Ranks) -> None:
    """Leave loaded step counters where the file was read to, although a fused kernel takes them from the device."""

    def place_state() -> None:
        original()
        ranks.session.places["step"] = "host"

    original = override(ranks.loader, "place_state", place_state)


def moments_left_on_the_host(ranks: Ranks) -> None:
    """Leave loaded moments on the device that the checkpoint names."""

    def place_state() -> None:
        original()
        ranks.session.places["moments"] = "host"

    original = override(ranks.loader, "place_state", place_state)


def schedule_alone_not_loaded(ranks: Ranks) -> None:
    """Take the schedule's own state dict for the one that was loaded."""
    override(ranks.loader, "load_schedule_only", nothing)
