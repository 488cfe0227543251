"""One rank: FSDP2's, with the script's optimizer."""

from __future__ import annotations

from shardproof.systems.torch_fsdp2.rank import Rank as Fsdp2Rank

from tests.conformance.own_adamw.optimizer import OwnAdamW


class Rank(Fsdp2Rank):
    """The `RankSystem` of `own-adamw`."""

    optimizer_class: type[OwnAdamW] = OwnAdamW

    def make_optimizer(self, init_seed: int) -> OwnAdamW:
        ask = self.contract.at_build(self.scenario, init_seed)
        numbers = {"lr": ask.lr, "betas": (ask.beta1, ask.beta2), "eps": ask.eps, "weight_decay": ask.weight_decay}
        return self.optimizer_class(self.param_groups(ask), **numbers)
