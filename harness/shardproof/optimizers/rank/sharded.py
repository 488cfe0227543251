"""A rank of FSDP2 with the optimizer that is asked about; everything else is the torch training loop's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardproof.mechanisms.fsdp2.rank.checkpoint import StateDictCheckpoint
from shardproof.mechanisms.fsdp2.rank.shard import fully_shard_units
from shardproof.observe.record import Record
from shardproof.optimizers.arms import HALVED_AT, Arm
from shardproof.optimizers.rank import construct, observe
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.scenario import Optimizer
from shardproof.torch_loop.loop import TorchRank


class Sharded(TorchRank):
    """The `RankSystem` of an arm that shards."""

    def __init__(self, context: RankContext, arm: Arm) -> None:
        super().__init__(context)
        self.arm = arm
        self.checkpoint = StateDictCheckpoint.from_text(self.scenario.checkpoint)

    def build(self, op: Op) -> None:
        construct.seed(op.init_seed)
        super().build(op)
        construct.enter(self.state.optimizer, "train")

    def shard(self, root: nn.Module) -> None:
        fully_shard_units(root, self.context, self.mesh)

    def make_optimizer(self, init_seed: int) -> torch.optim.Optimizer:
        params = list(self.params.values())
        groups = [params] if self.arm.groups == "one" else [params[::2], params[1::2]]
        return construct.optimizer_of(self.arm, groups, init_seed)

    def step(self, op: Op) -> None:
        if self.arm.halves and op.iteration == HALVED_AT:
            construct.halve_lr(self.state.optimizer)
        super().step(op)

    def save(self, op: Op) -> None:
        construct.enter(self.state.optimizer, "eval")
        self.checkpoint.save(self.state, self.context.checkpoint_path(op))
        construct.enter(self.state.optimizer, "train")

    def load(self, op: Op) -> None:
        self.checkpoint.load(self.state, self.context.checkpoint_path(op))
        construct.enter(self.state.optimizer, "train")

    def load_model_only(self, op: Op) -> None:
        self.checkpoint.load_model_only(self.state, self.context.checkpoint_path(op))

    def optimizer_records(self, op: Op) -> Iterator[Record]:
        at, optimizer = (op.index, self.context.rank), self.state.optimizer
        for fqn, parameter in self.params.items():
            shape, box = self.spec.param(fqn).spec.shape, self.own_box(self.spec.param(fqn))
            kept: Any = optimizer.state.get(parameter, {})
            yield from observe.state(at, fqn, parameter, shape, (box.start, box.size), kept)
        yield from observe.settings(at, optimizer.param_groups)

    def compute_records(self, op: Op) -> Iterator[Record]:
        """Nothing: what the forward saw is FSDP2's to answer for."""
        return iter(())

    def param_groups(self, ask: Optimizer) -> list[dict[str, Any]]:
        raise NotImplementedError("the arm says what the groups are")
