"""What FSDP2 promises: a plain torch training loop, with the dtypes of its mixed precision policy."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from shardproof.mechanisms.fsdp2 import limits as fsdp2
from shardproof.models import draws
from shardproof.oracle.contract import Clause, Contract
from shardproof.scenario import Scenario

if TYPE_CHECKING:
    from shardproof.observe.logical import Logical


class Fsdp2Contract(Contract):
    """Everything is as `Contract` says; the clauses say where torch promises it."""

    clauses = (
        *fsdp2.CLAUSES,
        Clause("a state that a script saves of a random generator comes back as it was", "torch.Generator.set_state"),
    )

    def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: AbstractSet[int]) -> Logical:
        if not draws(scenario.model):
            return truth
        from shardproof.oracle.generators import torch_streams

        return truth | torch_streams(scenario)

    def skips_frozen(self, scenario: Scenario) -> bool:
        """As `ignore_frozen_params` says (torch.distributed.checkpoint.state_dict.StateDictOptions)."""
        return "ignore_frozen" in scenario.checkpoint.split("+")[1:]


CONTRACT = Fsdp2Contract()
