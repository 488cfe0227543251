"""The system that the runs of `shardproof optimizer` are scenarios of: FSDP2 with an optimizer named by its import
path.

It is registered when this module is imported, and only then, as a plugin's would be: no plan walks over it, and the
usual oracles do not judge it. The axes of a scenario say what is sharded how, and what the program is; the optimizer
and what is done with it stand in the `Arm` beside the scenario.
"""

from __future__ import annotations

from shardproof.oracle.contract import Contract
from shardproof.protocol.accepts import Accepts
from shardproof.protocol.registry import register
from shardproof.protocol.system import System

__all__ = ["ACCEPTS", "CONTRACT", "SYSTEM"]

NAME = "optimizer-under-test"
ACCEPTS = Accepts(NAME)
CONTRACT = Contract()

SYSTEM = register(
    System(
        name=NAME,
        doc="An optimizer named by its import path, under FSDP2 and distributed checkpoint",
        home="shardproof.optimizers",
        distributions=("torch",),
        accepts_entry="system:ACCEPTS",
        contract_entry="system:CONTRACT",
        stored_entry="",
        rank="rank:rank_of",
        models_entry="models:MODELS",
        warm_up="rank.warm:warm_up",
    )
)
