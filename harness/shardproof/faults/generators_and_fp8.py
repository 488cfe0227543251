"""Faults in state beside parameters and optimizer state: random generators, and weights in fp8.

Each replaces seams of the reference by a mistake that a library made (`shardproof.faults.logical` has the tools).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardproof.faults.logical import nothing, override, to_bf16

if TYPE_CHECKING:
    from shardproof.reference.numerics import Array
    from shardproof.reference.quantised import Kept
    from shardproof.reference.streams import Streams
    from shardproof.reference.system import Ranks


def streams_taken_for_copies(ranks: Ranks) -> None:
    """Take the generators of data-parallel ranks for copies of each other, also those of ranks that share experts."""

    def stream_states() -> Streams:
        states: Streams = original()
        tp = ranks.session.mesh.tp
        if "expert" in states:
            first = states["expert"][:tp]
            states["expert"] = np.tile(first, (len(states["expert"]) // tp, 1))
        return states

    original = override(ranks.saver, "stream_states", stream_states)


def streams_not_loaded(ranks: Ranks) -> None:
    """Ask a checkpoint for generators only if this run would save some."""
    override(ranks.loader, "restore_streams", nothing)


def streams_loaded_as_one(ranks: Ranks) -> None:
    """Give a generator the list of all ranks' states, where it takes one state."""

    def restore_streams(saved: Streams) -> None:
        for stream, states in saved.items():
            if states.shape != ranks.session.streams[stream][0].shape:
                raise TypeError(f"the state of a generator has 2 numbers, and that of {stream!r} is {states.shape}")

    override(ranks.loader, "restore_streams", restore_streams)


def scale_of_the_shard_group(ranks: Ranks) -> None:
    """Reduce a weight's greatest magnitude over the data-parallel shards alone, not over all ranks that share it."""
    from shardproof.reference.quantised import greatest

    session = ranks.session

    def amax(name: str, tp_index: int) -> Array:
        own = [shards for shards in session.shards if shards.tp_index == tp_index]
        found: Array = np.max([greatest(shards.stepped, session.owns(name, shards)) for shards in own], axis=0)
        return found

    override(session, "amax", amax)


def _anew(kept: Kept, values: Array) -> Kept:
    """A weight quantised from values that have been through fp8 once."""
    from shardproof.reference.quantised import quantise, scales_for

    scale = scales_for(np.abs(values.astype(np.float32)).max(keepdims=True))
    return replace(kept, data=quantise(values, scale), inverse=np.repeat(np.float32(1) / scale, values.size))


def requantised_by_a_load(ranks: Ranks) -> None:
    """Load weights in the model's half precision, and quantise them again: not from masters, as training does."""

    def restore_weights(saved: dict[str, Kept]) -> None:
        original({
            name: _anew(kept, to_bf16(kept.data.astype(np.float32) * kept.inverse)) for name, kept in saved.items()
        })  # fmt: skip

    original = override(ranks.loader, "restore_weights", restore_weights)


def staged_as_plain_tensors(ranks: Ranks) -> None:
    """Stage quantised weights on the host as what they stand for, and quantise them again in the load."""

    def quantised_weights() -> dict[str, Kept]:
        return {
            name: replace(kept, data=to_bf16(kept.data.astype(np.float32) * kept.inverse))
            for name, kept in original().items()
        }

    def restore_weights(saved: dict[str, Kept]) -> None:
        original_load({
            name: kept if kept.data.itemsize == 1 else _anew(kept, kept.data) for name, kept in saved.items()
        })  # fmt: skip

    original = override(ranks.saver, "quantised_weights", quantised_weights)
    original_load = override(ranks.loader, "restore_weights", restore_weights)


def quantised_not_copied(ranks: Ranks) -> None:
    """Copy what a background writer is handed in a way that quantised tensors have not."""

    def staged(values: Array) -> Array:
        if values.itemsize == 1:
            raise NotImplementedError("a quantised tensor has no way to be copied to the host")
        copied: Array = original(values)
        return copied

    original = override(ranks.saver, "staged", staged)
