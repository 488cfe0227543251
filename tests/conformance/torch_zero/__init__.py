"""PyTorch's ZeroRedundancyOptimizer under DistributedDataParallel: the worked example of docs/adding-a-system.md.

Every rank has the whole model; the optimizer's state of a parameter lies on one rank. A checkpoint is gathered
(`consolidate_state_dict`) and written by rank 0.
"""

from __future__ import annotations

from harness.systems.protocol import System
from harness.systems.registry import register

SYSTEM = register(
    System(
        name="torch-zero",
        doc="PyTorch ZeroRedundancyOptimizer and DistributedDataParallel, unmodified",
        home=__name__,
        distributions=("torch",),
        data=f"{__name__}/data",
    )
)
