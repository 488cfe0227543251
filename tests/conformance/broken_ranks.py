"""The ranks of the systems of `broken.py`: FSDP2's, each with one mistake."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from shardproof.observe.record import Record, whole
from shardproof.observe.settings import SETTING
from shardproof.oracle import twin
from shardproof.program import Op
from shardproof.protocol.system import RankContext
from shardproof.systems.torch_fsdp2.rank import Rank


class Meddles(Rank):
    """Looking at it moves the optimizer's learning rate, from where the next step takes it."""

    def observe(self, op: Op) -> Iterable[Record]:
        records = list(super().observe(op))
        for group in self.state.optimizer.param_groups:
            group["lr"] /= 2
        return records


class Omits(Rank):
    """Records nothing of the second moments."""

    def observe(self, op: Op) -> Iterable[Record]:
        return (record for record in super().observe(op) if record.role != "exp_avg_sq")


class Untyped(Rank):
    """Records the numbers of param groups and nothing of what they are."""

    def observe(self, op: Op) -> Iterable[Record]:
        return (record for record in super().observe(op) if record.role != SETTING)


class IdleLoad(Rank):
    """Loads nothing, and says nothing of it."""

    def load(self, op: Op) -> None:
        pass


class Parrot(Rank):
    """Says what the twin says, whatever it holds."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        inputs, _ = context.contract.resolve(context.scenario)
        self.truth = twin.run(inputs)

    def observe(self, op: Op) -> Iterable[Record]:
        for key, value in self.truth.items():
            if key.op == op.index:
                yield whole(op.index, self.context.rank, key.role, key.fqn, value.dtype, value.shape, value.data)


class Uneven(Rank):
    """On more than two ranks its parameters come out one bit off."""

    def step(self, op: Op) -> None:
        super().step(op)
        if self.context.mesh.world > 2:
            with torch.no_grad():
                for parameter in self.params.values():
                    parameter.to_local().view(torch.int32).bitwise_xor_(1)


class RefusesShort(Rank):
    """Cannot build one model, and the limit that says so names another operation."""

    def build(self, op: Op) -> None:
        if self.scenario.model == "short":
            raise KeyError("short")
        super().build(op)
