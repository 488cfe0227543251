"""What the reference promises: under `zero1` what Megatron's flat buffers do, otherwise what a plain torch training
loop does."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from shardproof.oracle.contract import Clause, Contract
from shardproof.scenario import Scenario

if TYPE_CHECKING:
    from shardproof.observe.logical import Logical


class ReferenceContract(Contract):
    """The reference stands for itself: its shardings and checkpoint formats are its own."""

    clauses = (
        Clause(
            "gradient buffers hold the reduce dtype, else the storage dtype; accumulation happens in the buffer",
            "Megatron DistributedDataParallel, grad_reduce_in_fp32",
        ),
        Clause(
            "with masters, main gradient, master and moments have their dtype; the model parameter is the rounded "
            "master",
            "Megatron DistributedOptimizer",
        ),
        Clause(
            "a buffer is a flat concatenation of a dtype's parameters in reverse order, padded so that each rank owns "
            "an equal range of each bucket",
            "Megatron _ParamAndGradBuffer",
        ),
        Clause(
            "a checkpoint holds the random generators' states, one for each coordinate of a stream; a load gives every "
            "rank that of its own, unless the number of coordinates has changed",
            "Megatron model_parallel_cuda_manual_seed, get_rng_state; training/checkpointing.py, load_checkpoint",
        ),
        Clause(
            "a weight in fp8 is what the optimizer steps on times a scale, over all ranks that share the weight; a "
            "checkpoint holds its bytes, and a load quantises nothing anew",
            "TransformerEngine Float8CurrentScaling, DelayedScaling, pull requests 2713 and 2974; Megatron-LM pull "
            "request 6666",
        ),
    )

    def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: AbstractSet[int]) -> Logical:
        from shardproof.systems.reference.generators_and_fp8 import beside

        return beside(truth, scenario, self)

    def reference_sharding(self, scenario: Scenario) -> str:
        return scenario.sharding

    def reference_checkpoint(self, scenario: Scenario) -> str:
        return scenario.checkpoint


CONTRACT = ReferenceContract()
