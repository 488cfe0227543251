"""An optimizer of torch's ZeRO and the one inside of it count as one, whoever derives from it."""

from __future__ import annotations

from typing import Any

import torch
from shardproof.trainer.rank.kinds import OPTIMIZER
from shardproof.trainer.rank.optimizers import as_one
from shardproof.trainer.rank.walk import Met
from torch import nn


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """As torch's: it has the groups of all parameters, and in `optim` one that steps some of them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.optim = torch.optim.Adam(parameters[:1], lr=0.1)
        self._all_state_dicts: list[Any] = [self.optim.state_dict()]


class Mine(ZeroRedundancyOptimizer):
    """A user's own."""


def test_all_groups_and_the_state_of_some_are_one_optimizer() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    outer, plain = Mine(parameters), torch.optim.SGD(parameters, lr=0.1)
    mets = [Met("optimizer", outer, OPTIMIZER), Met("optimizer.optim", outer.optim, OPTIMIZER),
            Met("other", plain, OPTIMIZER)]  # fmt: skip
    other, whole = as_one(mets)
    assert other.value is plain
    assert whole.path == "optimizer"
    assert whole.value.param_groups is outer.param_groups
    assert whole.value.state is outer.optim.state
    assert isinstance(whole.value, torch.optim.Adam)


def test_other_optimizers_stay_as_they_are() -> None:
    one = Met("a", torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), OPTIMIZER)
    assert as_one([one]) == [one]
