"""What Megatron-Core promises: see `harness.mechanisms.megatron.contract`, but for its own Megatron-FSDP and for random
generators."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, ClassVar

from harness.mechanisms.megatron.contract import MegatronContract
from harness.mechanisms.megatron.generators import draws
from harness.oracle.contract import Clause
from harness.scenario import Scenario
from harness.systems.megatron_core.switches import under_fsdp

if TYPE_CHECKING:
    from harness.observe.logical import Logical


class MegatronCoreContract(MegatronContract):
    """What every system over Megatron-Core promises; under its own Megatron-FSDP, that the model section of a
    checkpoint holds the masters; and where a model draws random numbers, which ones every rank draws."""

    clauses: ClassVar[Sequence[Clause]] = (
        *MegatronContract.clauses,
        Clause(
            "with seed s the device's default generator and the stream data-parallel-rng start from s, "
            "model-parallel-rng from s + 2718 + the tensor-parallel rank, expert-parallel-rng from s + 1024 + 100 × "
            "the expert-parallel rank + the rank within an expert",
            "megatron.core.tensor_parallel.random.model_parallel_cuda_manual_seed",
        ),
        Clause(
            "a load gives every rank the generators of its tensor- and expert-parallel rank back, on any number of "
            "data-parallel ranks; at another tensor-parallel size it leaves them as they are",
            "megatron/training/checkpointing.py, get_rng_state, load_checkpoint; NVIDIA/Megatron-LM PR 6858",
        ),
    )

    def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: AbstractSet[int]) -> Logical:
        if not draws(scenario.model):
            return truth
        from harness.mechanisms.megatron.generators import megatron_streams

        return truth | megatron_streams(scenario)

    def masters_in_model(self, scenario: Scenario) -> bool:
        return under_fsdp(scenario) and not self.masters_in_state(scenario)


CONTRACT = MegatronCoreContract()
