"""Faults that confuse names, offsets or boxes: which rank owns which elements, and under which name a shard is
stored.

Each replaces seams of the reference by a mistake that a library made (`shardproof.faults.logical` has the tools).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from shardproof.faults.logical import override
from shardproof.reference.sections import Section

if TYPE_CHECKING:
    from shardproof.reference.checkpoint import Content, Logical
    from shardproof.reference.numerics import Array
    from shardproof.reference.placement import Fragment, Index, Piece
    from shardproof.reference.state import Shards
    from shardproof.reference.system import Ranks

RANKS_OF_A_NODE = 2


def expert_elements(ranks: Ranks, shards: Shards) -> Array:
    """Which of the elements that each rank owns are of experts, (S, m)."""
    experts = {p.fqn for p in ranks.session.catalogue.params if p.spec.ep_dim is not None}
    return ranks.session.catalogue.belongs_to(experts, shards.layout.shard_element)


def grouped_dim_not_shifted(ranks: Ranks) -> None:
    """Name the sharded dim of stacked weights as that of a single one: the new leading dim is not counted."""

    def boxes(role: str, fragment: Fragment) -> list[Piece]:
        found: list[Piece] = original(role, fragment)
        dim = fragment.slot.param.spec.tp_dim
        if not dim or len(fragment.slot.size) < 3:
            return found
        offset = fragment.slot.start[dim]
        return [piece._replace(start=_moved(piece.start, dim, offset)) for piece in found]

    original = override(ranks.saver, "boxes", boxes)


def _moved(start: tuple[int, ...], dim: int, offset: int) -> tuple[int, ...]:
    """A box's start whose offset along a dim is taken to be along the dim before it."""
    return (*start[: dim - 1], start[dim - 1] + offset, start[dim] - offset, *start[dim + 1 :])


def transposed_under_the_old_dims(ranks: Ranks) -> None:
    """Save stacked weights with their last two dims exchanged, and describe them as if they were not."""

    def save(form: str) -> Content:
        content: Content = original(form)
        for filed in content.get("ranks", {}).values():
            for part in (part for parts in filed.get("param", {}).values() for part in parts):
                if part["data"].ndim == 3:
                    turned = np.ascontiguousarray(part["data"].swapaxes(1, 2))
                    part["data"] = turned.reshape(part["data"].shape)
        return content

    original = override(ranks.saver, "save", save)


def experts_taken_for_replicas(ranks: Ranks) -> None:
    """The saver treats the expert weights of different expert-parallel ranks as replicas of one tensor, so that a
    checkpoint holds only the first rank's experts."""

    def written_fragments(shards: Shards) -> Iterator[Fragment]:
        for fragment in original(shards):
            if fragment.slot.param.spec.ep_dim is None or fragment.shard == 0:
                yield fragment

    original = override(ranks.saver, "written_fragments", written_fragments)


def local_state_as_global(ranks: Ranks) -> None:
    """Save each rank's share of the optimizer state as if it were the whole tensor: every box begins at zero."""

    def boxes(role: str, fragment: Fragment) -> list[Piece]:
        found: list[Piece] = original(role, fragment)
        return found if role == "param" else [piece._replace(start=(0,) * len(piece.start)) for piece in found]

    original = override(ranks.saver, "boxes", boxes)


def state_without_expert_axis(ranks: Ranks) -> None:
    """Describe the state of stacked weights without the offset along the stack, which only weights are given."""

    def boxes(role: str, fragment: Fragment) -> list[Piece]:
        found: list[Piece] = original(role, fragment)
        if role == "param" or len(fragment.slot.size) < 3:
            return found
        return [piece._replace(start=(0, *piece.start[1:])) for piece in found]

    original = override(ranks.saver, "boxes", boxes)


def empty_shard_wins(ranks: Ranks) -> None:
    """Give an empty shard the offset of the last real one: of the two, which look the same, the empty one is kept."""

    def written_fragments(shards: Shards) -> Iterator[Fragment]:
        owners: dict[str, int] = {}
        for fragment in shards.layout.fragments:
            owners[fragment.slot.param.fqn] = fragment.shard
        for fragment in original(shards):
            last = owners[fragment.slot.param.fqn]
            if fragment.shard != last or last == ranks.session.mesh.dp_shard - 1:
                yield fragment

    original = override(ranks.saver, "written_fragments", written_fragments)


def offset_from_the_local_size(ranks: Ranks) -> None:
    """Infer where a shard begins from its own number of rows, which is smaller on the last rank than on others."""

    def boxes(role: str, fragment: Fragment) -> list[Piece]:
        found: list[Piece] = original(role, fragment)
        first = fragment.slot.start[0]
        return [p._replace(start=(first + fragment.shard * p.size[0], *p.start[1:])) for p in found]

    original = override(ranks.saver, "boxes", boxes)


def shards_swizzled_as_tensor_parallel(ranks: Ranks) -> None:
    """Take each data-parallel shard of a fused weight for a tensor-parallel one: its first half for gate, its second
    for up."""

    def sections(fragment: Fragment, start: int, numel: int) -> Iterator[tuple[str, int, int, int]]:
        fqn = fragment.slot.param.fqn
        if not fqn.endswith("fc1.weight"):
            yield from original(fragment, start, numel)
            return
        yield f"{fqn}:gate", start // 2, 0, numel // 2
        yield f"{fqn}:up", start // 2, numel // 2, numel

    original = override(ranks.saver, "sections", sections)


def sections_of_equal_size(ranks: Ranks) -> None:
    """Take a fused weight apart into sections of one size, whatever the sizes of its projections are."""

    def sections_of(fragment: Fragment) -> tuple[Section, ...]:
        found: tuple[Section, ...] = original(fragment)
        return tuple(Section(one.name, index, 1, len(found)) for index, one in enumerate(found))

    original = override(ranks.saver, "sections_of", sections_of)


def floor_shares(ranks: Ranks) -> None:
    """Join a bucket's shares as if each were the floor of elements over ranks."""

    def unpad(bucket: Array, table: list[Any], number: int) -> Array:
        parts = ranks.session.mesh.dp_shard
        share = original(bucket, table, number).size // parts
        return bucket.reshape(parts, -1)[:, :share].ravel()

    original = override(ranks.loader, "unpad", unpad)


def buffers_of_the_first_kind(ranks: Ranks) -> None:
    """Read every parameter's state out of the first flat buffer, with the offsets of its own one."""

    def read(content: Content) -> Logical:
        buckets = {
            tp: dict.fromkeys(by_storage, next(iter(by_storage.values())))
            for tp, by_storage in content.get("buckets", {}).items()
        }
        logical: Logical = original({**content, **({"buckets": buckets} if buckets else {})})
        return logical

    original = override(ranks.loader, "read", read)


def state_in_model_order(ranks: Ranks) -> None:
    """Number parameters by the model's order and their state by the order of the param groups."""
    session = ranks.session

    def build_index_map() -> dict[str, tuple[int, int]]:
        places = [(group, at) for group, names in enumerate(session.installed) for at, _ in enumerate(names)]
        names = (p.fqn for p in session.catalogue.params if p.fqn in session.held)
        return dict(zip(names, places, strict=True))

    override(session, "build_index_map", build_index_map)


def zipped_by_position(ranks: Ranks) -> None:
    """Match the loaded weights with the model's by position, although the file has them in the order of their names."""

    def restore_model(logical: Logical, content: Content) -> None:
        weights = logical["param"]
        matched = dict(zip(weights, (weights[name] for name in sorted(weights)), strict=True))
        original({**logical, "param": matched}, content)

    original = override(ranks.loader, "restore_model", restore_model)


def rows_for_a_flat_partition(ranks: Ranks) -> None:
    """Refresh a flat partition of the masters from rows of the weight: from a chunk of dim 0, not a run of elements."""

    def reload_params() -> None:
        original()
        for shards in ranks.session.shards:
            for fragment in shards.layout.fragments:
                assert shards.model is not None
                slot, parts = fragment.slot, shards.layout.order.shape[0]
                weight = shards.model[0, 0, slot.offset : slot.offset + slot.numel].reshape(slot.size)
                rows = -(-slot.size[0] // parts)
                own = weight[fragment.shard * rows : (fragment.shard + 1) * rows].ravel()
                target = shards.stepped[:, fragment.shard, fragment.at : fragment.at + fragment.numel]
                target[:, : own.size] = own[: fragment.numel].astype(target.dtype)

    original = override(ranks.session, "reload_params", reload_params)


def rank_within_the_node(ranks: Ranks) -> None:
    """On load, cut out the share of a rank's number within its node: later nodes get those of the first."""

    def owned(shards: Shards) -> Index:
        elements: Index = original(shards)
        return elements[np.arange(len(elements)) % RANKS_OF_A_NODE]

    original = override(ranks.loader, "owned", owned)


def _of_the_expert_group(ranks: Ranks, shards: Shards, values: Array) -> Array:
    """What ranks own, (R, S, m), where each takes for its experts the row of its number among those ranks that have the
    same experts."""
    peers = values.shape[1] // ranks.session.placement.expert_parallel
    others = values[:, np.arange(values.shape[1]) % peers]
    taken: Array = np.where(expert_elements(ranks, shards), others, values)
    return taken


def offset_of_another_group(ranks: Ranks) -> None:
    """Cut the experts' masters at the rank within one group times the share of another group."""

    def refresh_masters(shards: Shards) -> None:
        original(shards)
        if shards.stages.master is not None:
            shards.stepped = _of_the_expert_group(ranks, shards, shards.stepped)

    original = override(ranks.session, "refresh_masters", refresh_masters)


def result_to_another_partition(ranks: Ranks) -> None:
    """Write the updated share of the experts to the partition of the rank's number in another group."""

    def rounded_to_storage(shards: Shards) -> Array:
        return _of_the_expert_group(ranks, shards, original(shards))

    original = override(ranks.trainer, "rounded_to_storage", rounded_to_storage)


def one_file_for_all(ranks: Ranks) -> None:
    """Let all ranks write files of the same name: of each tensor the last rank's part is left."""

    def save(form: str) -> Content:
        content: Content = original(form)
        left: Content = {}
        for filed in content.get("ranks", {}).values():
            for role, tensors in filed.items():
                left.setdefault(role, {}).update(tensors)
        return {**content, "ranks": {"rank_0": left}} if "ranks" in content else content

    original = override(ranks.saver, "save", save)
