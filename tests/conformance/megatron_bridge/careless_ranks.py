"""The ranks of `careless.py`."""

from __future__ import annotations

from shardproof.mechanisms.megatron.rank.streams import Streams
from shardproof.observe.generators import SEED_OF_A_BUILD
from shardproof.program import Op
from shardproof.systems.megatron_bridge.rank import Rank


class _AsRank0(Streams):
    """Seeds the tracker as tensor-parallel rank 0 does."""

    def seed(self, init_seed: int) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        super().seed(init_seed)
        seed = self.context.scenario.seed % 2**31 + SEED_OF_A_BUILD * init_seed
        model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0)


class AllAsRank0(Rank):
    """All ranks draw what rank 0 draws."""

    def streams(self) -> Streams:
        return _AsRank0(self.context)


class SavesNone(Rank):
    """A script without save_rng."""

    def save(self, op: Op) -> None:
        streams, self.state.streams = self.state.streams, None
        super().save(op)
        self.state.streams = streams
