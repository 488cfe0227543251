"""Megatron-Core's checkpoints: its own formats, and `fsdp_dtensor` of its Megatron-FSDP."""

from __future__ import annotations

from pathlib import Path

from shardproof.mechanisms.megatron.folder import MegatronFolder
from shardproof.mechanisms.megatron.stored import MegatronStored
from shardproof.observe.logical import Logical
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.scenario import Scenario
from shardproof.systems.megatron_core.contract import CONTRACT
from shardproof.systems.megatron_core.fsdp_dtensor import read_fsdp_dtensor

FSDP = "fsdp_dtensor"
"""The format that stores of each parameter only what the optimizer steps on: the master where there is one. A frozen
parameter has none, and is stored as it is."""


class MegatronCoreStored(MegatronStored):
    """Chooses the reader and the contents by format: `fsdp_dtensor` has its own, the others are Megatron's."""

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        if scenario.checkpoint == FSDP:
            return read_fsdp_dtensor(path, op, scenario)
        return super().read(path, op, scenario)

    def must_hold(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        if scenario.checkpoint != FSDP:
            return super().must_hold(live, op, scenario)
        held = [p for p in self.contract.parameters(scenario, op.mesh) if p.held]
        mastered = {name for p in held if p.stages.master for name in p.names}
        kept = self.stored_values(live, op, scenario)
        return {k: v for k, v in kept.items() if k.role != "param" or k.fqn not in mastered}


STORED = MegatronCoreStored(CONTRACT)
LAYOUTS = (MegatronFolder(),)
