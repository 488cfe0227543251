"""What the reference promises: under `zero1` what Megatron's flat buffers do, otherwise what a plain torch training
loop does."""

from __future__ import annotations

from harness.oracle.contract import Clause, Contract
from harness.scenario import Scenario


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
    )

    def reference_sharding(self, scenario: Scenario) -> str:
        return scenario.sharding

    def reference_checkpoint(self, scenario: Scenario) -> str:
        return scenario.checkpoint


CONTRACT = ReferenceContract()
