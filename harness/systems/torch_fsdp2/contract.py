"""What FSDP2 promises: a plain torch training loop, with the dtypes of its mixed precision policy."""

from __future__ import annotations

from harness.mechanisms.fsdp2 import limits as fsdp2
from harness.mechanisms.fsdp2.formats import checkpoint_plan
from harness.oracle.contract import Contract
from harness.scenario import Scenario


class Fsdp2Contract(Contract):
    """Everything is as `Contract` says; the clauses say where torch promises it."""

    clauses = fsdp2.CLAUSES

    def skips_frozen(self, scenario: Scenario) -> bool:
        """As `ignore_frozen_params` says (torch.distributed.checkpoint.state_dict.StateDictOptions)."""
        return checkpoint_plan(scenario.checkpoint).ignore_frozen


CONTRACT = Fsdp2Contract()
