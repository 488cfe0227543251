"""The ranks of `careless.py`."""

from __future__ import annotations

from shardproof.program import Op
from shardproof.systems.torch_fsdp2.rank import Rank


class Forgets(Rank):
    """Saves its generators, and loads none."""

    def load(self, op: Op) -> None:
        streams, self.state.streams = self.state.streams, None
        super().load(op)
        self.state.streams = streams


class Rank0s(Rank):
    """Takes the generator of the first data-parallel rank for everybody's at a load."""

    def load(self, op: Op) -> None:
        streams = self.state.streams
        assert streams is not None
        own, counts = dict(streams.places), dict(streams.counts)
        streams.places["data"] = 0
        super().load(op)
        streams.places, streams.counts = own, counts
