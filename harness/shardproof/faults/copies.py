"""Faults in which a stale copy of some state is used later: host copies, compute weights, a second shard, aliases of a
tied parameter, cached dictionaries.

Each replaces seams of the reference by a mistake that a library made (`shardproof.faults.logical` has the tools).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardproof.faults.logical import override
from shardproof.observe.record import every_rank
from shardproof.oracle.inputs import Operation

if TYPE_CHECKING:
    from shardproof.observe.record import Record
    from shardproof.reference.checkpoint import Content, Logical
    from shardproof.reference.numerics import Array
    from shardproof.reference.placement import FlatLayout, Fragment
    from shardproof.reference.schedule import Group
    from shardproof.reference.state import Shards
    from shardproof.reference.system import Ranks


def short_fragments(layout: FlatLayout) -> list[Fragment]:
    """What ranks own whose share of a bucket ends in padding."""
    shares = {slot.param.fqn: bucket.share for bucket in layout.buckets for slot in bucket.slots}
    return [fragment for fragment in layout.fragments if fragment.numel < shares[fragment.slot.param.fqn]]


def refresh_skipped_for_offload(ranks: Ranks) -> None:
    """Return early from the refresh of masters where the optimizer offloads."""

    def reload_params() -> None:
        if not ranks.session.placement.offload:
            original()

    original = override(ranks.session, "reload_params", reload_params)


def moments_in_two_views(ranks: Ranks) -> None:
    """After a load, step what is offloaded with the moments that existed before it: the inner optimizer's own view."""
    held: list[dict[str, Array]] = []

    def load(content: Content) -> None:
        held[:] = [dict(shards.moments) for shards in ranks.session.shards]
        original(content)

    def update() -> None:
        for shards, moments in zip(ranks.session.shards, held, strict=False):
            for role, values in moments.items():
                if shards.offloaded is not None:
                    shards.moments[role] = np.where(shards.offloaded, values, shards.moments[role])
        held.clear()
        original_update()

    original = override(ranks.loader, "load", load)
    original_update = override(ranks.trainer, "update", update)


def masters_loaded_alone(ranks: Ranks) -> None:
    """Load masters, and leave the weights that forwards use to the next step."""

    def restore_model(logical: Logical, content: Content) -> None:
        held = [shards.model for shards in ranks.session.shards]
        original(logical, content)
        for shards, model in zip(ranks.session.shards, held, strict=True):
            if shards.stages.master is not None:
                shards.model = model

    original = override(ranks.loader, "restore_model", restore_model)


def secondary_shard_stale(ranks: Ranks) -> None:
    """Gather weights from a second copy of the shards, which a step refreshes and a load does not."""
    secondary: dict[int, Array] = {}

    def keep() -> None:
        secondary.update({id(shards): shards.stepped.copy() for shards in ranks.session.shards})

    def build() -> None:
        original_build()
        keep()

    def publish() -> None:
        original_publish()
        keep()

    def gather(shards: Shards) -> Array:
        return shards.gathered(secondary[id(shards)]) if shards.model is None else shards.model

    original_build = override(ranks.session, "build", build)
    original_publish = override(ranks.trainer, "publish", publish)
    override(ranks.trainer, "gather", gather)


def padded_shards_saved_stale(ranks: Ranks) -> None:
    """Save shards that need padding as they were at the build: they were padded into new memory after a reference to
    them had been cached."""
    held: dict[int, Array] = {}

    def build() -> None:
        original_build()
        held.update({id(shards): shards.storage_shard[0].copy() for shards in ranks.session.shards})

    def parameters(shards: Shards) -> Array:
        values: Array = original(shards).copy()
        for fragment in short_fragments(shards.layout):
            own = (fragment.shard, slice(fragment.at, fragment.at + fragment.numel))
            values[own] = held[id(shards)][own]
        return values

    original_build = override(ranks.session, "build", build)
    original = override(ranks.saver, "parameters", parameters)


def masters_of_an_old_attribute(ranks: Ranks) -> None:
    """Save the masters that an attribute held at the build, although steps keep them under another name."""
    held: dict[int, Array] = {}

    def build() -> None:
        original_build()
        held.update({id(shards): shards.stepped[0].copy() for shards in ranks.session.shards})

    def optimizer_state(shards: Shards) -> dict[str, Array]:
        arrays: dict[str, Array] = original(shards)
        return {role: held[id(shards)] if role == "master" else values for role, values in arrays.items()}

    original_build = override(ranks.session, "build", build)
    original = override(ranks.saver, "optimizer_state", optimizer_state)


def saves_what_it_loaded(ranks: Ranks) -> None:
    """After a load, save what was loaded instead of what training made of it."""
    loaded: list[Content] = []

    def load(content: Content) -> None:
        original_load(content)
        loaded.append(content)

    def save(form: str) -> Content:
        content: Content = loaded[-1] if loaded else original_save(form)
        return content

    original_load = override(ranks.loader, "load", load)
    original_save = override(ranks.saver, "save", save)


def _detach_aliases(ranks: Ranks, owners: Callable[[], set[int]]) -> None:
    """From the build on, some ranks' aliases of tied parameters are tensors of their own that no step reaches."""
    detached: dict[tuple[int, str, tuple[int, ...]], Record] = {}

    def build() -> None:
        original_build()
        chosen = owners()
        for record in every_rank(original_observe(Operation(0, "build", 0, 0, 0))):
            tied = record.role == "param" and ranks.session.model.param(record.fqn).spec.tied_to
            if tied and record.rank in chosen:
                detached[record.rank, record.fqn, record.start] = record

    def observe(op: Operation) -> Iterable[Record]:
        for record in every_rank(original_observe(op)):
            own = detached.get((record.rank, record.fqn, record.start)) if record.role == "param" else None
            yield own._replace(op=op.index) if own else record

    original_build = override(ranks.session, "build", build)
    original_observe = override(ranks.observer, "observe", observe)


def tied_apart_at_build(ranks: Ranks) -> None:
    """Materialise every name of a tied parameter by itself; steps reach the first one only."""
    _detach_aliases(ranks, lambda: set(range(ranks.session.mesh.world)))


def tied_apart_in_padding(ranks: Ranks) -> None:
    """Where a tied parameter's shard needs padding, one of its names is gathered from memory that no step writes."""

    def owners() -> set[int]:
        session = ranks.session
        return {
            (replica * session.mesh.dp_shard + fragment.shard) * session.mesh.tp + shards.tp_index
            for shards in session.shards
            for fragment in short_fragments(shards.layout)
            for replica in range(session.mesh.dp_replicate)
            if len(session.catalogue.names[fragment.slot.param.fqn]) > 1
        }

    _detach_aliases(ranks, owners)


def _schedule_on(ranks: Ranks, groups: list[Group]) -> None:
    """Let the schedule write the learning rates of these groups, whichever the optimizer has by then."""

    def advance_schedule() -> None:
        live = ranks.session.groups
        ranks.session.groups = groups
        original()
        ranks.session.groups = live

    original = override(ranks.trainer, "advance_schedule", advance_schedule)


def schedule_of_dead_groups(ranks: Ranks) -> None:
    """Keep the list of param groups that existed at the build: after a load the schedule writes to dead ones."""
    cached: list[Group] = []

    def build() -> None:
        original()
        cached[:] = ranks.session.groups

    original = override(ranks.session, "build", build)
    _schedule_on(ranks, cached)


def schedule_of_outer_groups(ranks: Ranks) -> None:
    """Let the schedule write to groups of a wrapper that are never copied into the optimizer's own."""
    outer: list[Group] = []

    def build() -> None:
        original()
        outer[:] = [replace(group) for group in ranks.session.groups]

    original = override(ranks.session, "build", build)
    _schedule_on(ranks, outer)


def scalars_cached_by_value(ranks: Ranks) -> None:
    """Save the hyperparameters of a cached state dict: its tensors are live, its numbers those of the build."""
    cached: list[Group] = []

    def build() -> None:
        original_build()
        cached[:] = [replace(group) for group in ranks.session.groups]

    def common() -> Content:
        content: Content = original()
        groups = [{**group, "hyper": kept.hyper} for group, kept in zip(content["groups"], cached, strict=True)]
        return {**content, "groups": groups}

    original_build = override(ranks.session, "build", build)
    original = override(ranks.saver, "common", common)


def written_at_the_end(ranks: Ranks) -> None:
    """Let an asynchronous save read the tensors when it ends, since what it staged are the live ones."""
    override(ranks.saver, "finish", lambda staged: ranks.saver.save(staged["format"]))


def kept_by_reference(ranks: Ranks) -> None:
    """Keep the live state in memory and no copy of it, so that what is written later is what training made of it."""
    override(ranks.saver, "save_kept", lambda kept: ranks.saver.save(kept["format"]))


# -- parts of two saves, and memory that was never filled


def last_file_of_an_earlier_save(ranks: Ranks) -> None:
    """Save into the folder of an earlier checkpoint, and leave the last rank's file as it lies there."""
    earlier: dict[str, Any] = {}

    def save(form: str) -> Content:
        content: Content = original(form)
        files = content.get("ranks", {})
        last = list(files)[-1:]
        kept = {name: files[name] for name in last}
        files.update({name: earlier[name] for name in last if name in earlier})
        earlier.update(kept)
        return content

    original = override(ranks.saver, "save", save)


def tail_never_filled(ranks: Ranks) -> None:
    """Load into a buffer that was not cleared, and fill all but its last quarter."""

    def take(shards: Shards, role: str, tensors: dict[str, Array], dtype: str) -> Array:
        own: Array = original(shards, role, tensors, dtype).copy()
        bits = np.random.default_rng(own.size).bytes(own.nbytes)
        tail = own.shape[-1] - own.shape[-1] // 4
        own[..., tail:] = np.frombuffer(bits, own.dtype).reshape(own.shape)[..., tail:]
        return own

    original = override(ranks.loader, "take", take)
