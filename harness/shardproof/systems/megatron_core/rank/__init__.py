"""Runs Megatron-Core on one rank: the training loop and checkpoints, with DDP or with Megatron-Core's own Megatron-FSDP
as the wrapper.

*Verifies* nothing by itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from shardproof.emulation.fused import FusedAdam
from shardproof.mechanisms.megatron.rank import loop
from shardproof.mechanisms.megatron.rank.loop import MegatronLoop, emulated
from shardproof.mechanisms.megatron.rank.observe import Owner
from shardproof.mechanisms.megatron.rank.state import TrainState
from shardproof.mechanisms.megatron.rank.streams import Streams
from shardproof.models import draws
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.systems.megatron_core.formats import checkpoint_plan
from shardproof.systems.megatron_core.switches import fsdp_strategy

LAZILY = (
    "megatron.core.dist_checkpointing.serialization", "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.fully_parallel", "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.validation", "shardproof.mechanisms.megatron.host_elements",
    "shardproof.systems.megatron_core.rank.checkpoint", "torch.utils.serialization.config",
)  # fmt: skip
"""What is imported where a checkpoint is written or read: a tenth of the processor time of a nightly, in ranks."""

library = loop.library
"""Imports Megatron-Core on the emulated device or, on cuda, on the real one."""


class Rank(MegatronLoop):
    """The `RankSystem` of `megatron-core`."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.plan = checkpoint_plan(self.scenario.checkpoint)
        self.strategy = fsdp_strategy(self.scenario)

    def build(self, op: Op) -> None:
        FusedAdam.local_state = "local_state" in self.scenario.options
        super().build(op)

    def without_copies(self) -> AbstractContextManager[None]:
        """Saves that have no copy of what they save. It is a seam for boundary faults (`shardproof.faults.overlap`)."""
        from shardproof.systems.megatron_core.rank import checkpoint

        return checkpoint.without_preload()

    @emulated
    def save(self, op: Op) -> None:
        from shardproof.systems.megatron_core.rank import checkpoint

        with self.gathered():
            checkpoint.save(self.state, self.plan, self.context.checkpoint_path(op), self.in_flight)

    @emulated
    def load(self, op: Op) -> None:
        from shardproof.systems.megatron_core.rank import checkpoint

        with self.gathered():
            checkpoint.load(self.state, self.plan, self.context.checkpoint_path(op))

    @emulated
    def load_model_only(self, op: Op) -> None:
        from shardproof.systems.megatron_core.rank import checkpoint

        with self.gathered():
            checkpoint.load_model_only(self.state, self.plan, self.context.checkpoint_path(op))

    def data_parallel(self, model: torch.nn.Module) -> Any:
        if not self.strategy:
            return super().data_parallel(model)
        from shardproof.systems.megatron_core.rank import fsdp

        return fsdp.wrap(self.scenario, self.context.mesh, model)

    def streams(self) -> Streams | None:
        return Streams(self.context) if draws(self.scenario.model) else None

    def owner_of(self, state: TrainState) -> Owner | None:
        if not self.strategy:
            return None
        from shardproof.systems.megatron_core.rank import fsdp

        return fsdp.Ownership.from_state(state)

    @property
    def defers_sync(self) -> bool:
        """With overlap_grad_reduce the training script enters `no_sync` in any case: only after it is a microbatch the
        last."""
        return not self.strategy or "overlap_grad_reduce" in self.scenario.options

    @property
    def hooks_gather(self) -> bool:
        return super().hooks_gather and not self.strategy


def warm_up() -> None:
    """Run small scenarios in this process, for the ranks forked from it."""
    loop.warm_up("megatron-core", Rank, LAZILY)
