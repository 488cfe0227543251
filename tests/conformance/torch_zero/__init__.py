"""PyTorch's ZeroRedundancyOptimizer under DistributedDataParallel: the worked example of docs/adding-a-system.md.

Every rank has the whole model; the optimizer's state of a parameter lies on one rank. A checkpoint is gathered
(`consolidate_state_dict`) and written by rank 0.

It is a plugin: nothing of shardproof knows its name. It brings everything that a built-in system has. Its data (walks,
costs, known issues and their regressions, the plain scenario) lie in `data/` beside it.
"""

from __future__ import annotations

from shardproof.plugins import register_system
from shardproof.program import provide
from shardproof.protocol.system import System

SYSTEM = register_system(
    System(
        name="torch-zero",
        doc="PyTorch ZeroRedundancyOptimizer and DistributedDataParallel, unmodified",
        home=__name__,
        distributions=("torch",),
        data=f"{__name__}/data",
        models_entry="models:MODELS",
        rules_entry="rules:RULES",
        predicates_entry="accepts:PREDICATES",
    )
)

provide("relay", "build step save restart build load step save restart build load step")
