"""The ranks of `careless.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from shardproof.mechanisms.megatron.rank.streams import Streams
from shardproof.systems.megatron_core.rank import Rank


class _WithoutTracker(Streams):
    """Knows the device's default generator alone."""

    def state(self) -> list[dict[str, Any]]:
        return [own | {"rng_tracker_states": {}} for own in super().state()]

    def restore(self, saved: list[Mapping[str, Any]]) -> None:
        torch.cuda.set_rng_state(saved[0]["cuda_rng_state"])


class _OfRank0(Streams):
    """Takes the state of rank 0 for everybody's."""

    def state(self) -> list[dict[str, Any]]:
        states: list[Any] = [super().state()]
        dist.broadcast_object_list(states)
        found: list[dict[str, Any]] = states[0]
        return found


class NoTracker(Rank):
    """A script that saves and loads all generators of the device but the tracker's."""

    def streams(self) -> Streams:
        return _WithoutTracker(self.context)


class Rank0s(Rank):
    """A script whose rank 0 saves its generators for all."""

    def streams(self) -> Streams:
        return _OfRank0(self.context)
