"""What ZeroRedundancyOptimizer promises: a torch training loop, whose param groups only a parameter's owner steps."""

from __future__ import annotations

from shardproof.oracle.contract import Clause, Contract


class ZeroContract(Contract):
    """`Contract` says the rest."""

    clauses = (
        Clause(
            "every parameter is stepped by one rank, and broadcast from it afterwards",
            "torch.distributed.optim.ZeroRedundancyOptimizer.step",
        ),
        Clause(
            "gradients are averaged over all ranks in the storage dtype",
            "torch.nn.parallel.DistributedDataParallel",
        ),
    )
    owner_groups = True


CONTRACT = ZeroContract()
