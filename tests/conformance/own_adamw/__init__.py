"""The worked example of docs/adding-an-optimizer.md, a plugin: a training script's own AdamW under FSDP2.

Everything is FSDP2's but the optimizer. The scenario's axis says `adamw/impl=forloop`: that is the arithmetic which the
class promises to have.
"""

from __future__ import annotations

from shardproof.oracle.contract import Clause
from shardproof.plugins import register_system
from shardproof.protocol.accepts import NUMBERS, Accepts, Only, Parts
from shardproof.protocol.system import System
from shardproof.scenario import Optimizer, Scenario
from shardproof.systems.torch_fsdp2.accepts import ACCEPTS as FSDP2
from shardproof.systems.torch_fsdp2.contract import Fsdp2Contract
from shardproof.systems.torch_fsdp2.stored import STORED

__all__ = ["ACCEPTS", "CONTRACT", "STORED", "SYSTEM"]

OPTIMIZER = Parts(
    Optimizer,
    kind=Only("adamw", because="the script has an AdamW of its own"),
    impl=Only("forloop", because="it computes as torch's loop does"),
    groups=Only("model", "one"),
    **NUMBERS,
)
ACCEPTS = Accepts("own-adamw", limits=FSDP2.own_limits, **FSDP2.axes | {"optimizer": OPTIMIZER})


class OwnContract(Fsdp2Contract):
    """FSDP2's promises, and the optimizer's."""

    clauses = (
        *Fsdp2Contract.clauses,
        Clause("AdamW's arithmetic, operation by operation as torch's loop", "the docstring of OwnAdamW"),
    )

    def stepper_entry(self, scenario: Scenario) -> str:
        return f"{__name__}.optimizer:for_the_twin"


CONTRACT = OwnContract()
SYSTEM = register_system(
    System(
        name="own-adamw",
        doc="A training script's own AdamW under FSDP2",
        home=__name__,
        distributions=("torch",),
        data=f"{__name__}/data",
        accepts_entry=":ACCEPTS",
        contract_entry=":CONTRACT",
        stored_entry=":STORED",
    )
)
