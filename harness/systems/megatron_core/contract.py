"""What Megatron-Core promises: see `harness.mechanisms.megatron.contract`, but for its own Megatron-FSDP."""

from __future__ import annotations

from harness.mechanisms.megatron.contract import MegatronContract
from harness.scenario import Scenario
from harness.systems.megatron_core.switches import under_fsdp


class MegatronCoreContract(MegatronContract):
    """What every system over Megatron-Core promises; and under its own Megatron-FSDP, that the model section of a
    checkpoint holds the masters."""

    def masters_in_model(self, scenario: Scenario) -> bool:
        return under_fsdp(scenario) and not self.masters_in_state(scenario)


CONTRACT = MegatronCoreContract()
