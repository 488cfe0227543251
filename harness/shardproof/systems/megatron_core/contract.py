"""What Megatron-Core promises: see `shardproof.mechanisms.megatron.contract`, but for its own Megatron-FSDP and for
random generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from shardproof.mechanisms.megatron.contract import SEEDS, MegatronContract
from shardproof.oracle.contract import Clause
from shardproof.scenario import Scenario
from shardproof.systems.megatron_core.switches import under_fsdp


class MegatronCoreContract(MegatronContract):
    """What every system over Megatron-Core promises; under its own Megatron-FSDP, that the model section of a
    checkpoint holds the masters; and what becomes of the generators of a model that draws."""

    clauses: ClassVar[Sequence[Clause]] = (
        *MegatronContract.clauses,
        SEEDS,
        Clause(
            "a load gives every rank the generators of its tensor- and expert-parallel rank back, on any number of "
            "data-parallel ranks; at another tensor-parallel size it leaves them as they are",
            "megatron/training/checkpointing.py, get_rng_state, load_checkpoint; NVIDIA/Megatron-LM PR 6858",
        ),
    )

    def masters_in_model(self, scenario: Scenario) -> bool:
        return under_fsdp(scenario) and not self.masters_in_state(scenario)


CONTRACT = MegatronCoreContract()
