"""The ranks of `careless.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from shardproof.systems.transformer_engine.rank import Rank
from shardproof.systems.transformer_engine.rank.streams import TrackedStreams


class _WithoutTracker(TrackedStreams):
    """Knows the device's default generator alone."""

    def state(self) -> dict[str, torch.Tensor]:
        return {name: state for name, state in super().state().items() if name.startswith("replicated")}


class _OfRank0(TrackedStreams):
    """Saves the states of rank 0 for everybody's."""

    def state(self) -> dict[str, torch.Tensor]:
        own = super().state()
        states: list[Any] = [list(own.values())]
        dist.broadcast_object_list(states)
        return dict(zip(own, states[0], strict=True))


class NoTracker(Rank):
    """A script that saves and loads all generators of the device but the tracker's."""

    def streams(self) -> TrackedStreams:
        return _WithoutTracker(self.context)


class Rank0s(Rank):
    """A script whose rank 0 saves its generators for all."""

    def streams(self) -> TrackedStreams:
        return _OfRank0(self.context)
