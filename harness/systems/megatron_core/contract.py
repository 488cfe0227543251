"""What Megatron-Core promises."""

from __future__ import annotations

from harness.mechanisms.megatron.contract import MegatronContract
from harness.scenario import Scenario
from harness.systems.megatron_core.switches import under_fsdp


class MegatronCoreContract(MegatronContract):
    """As every system over Megatron-Core; under its Megatron-FSDP a checkpoint's model section holds the masters."""

    def masters_in_model(self, scenario: Scenario) -> bool:
        return under_fsdp(scenario) and not self.masters_in_state(scenario)


CONTRACT = MegatronCoreContract()
