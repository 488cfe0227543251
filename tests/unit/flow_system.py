"""A system that is right by definition: its one rank observes what the twin says. For tests of the whole flow.

`tests.unit.flow_faults`, a plugin for servers, makes its ranks and its judges fail.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardproof.observe.record import Record, whole
from shardproof.oracle.contract import Contract
from shardproof.program import Op
from shardproof.protocol.accepts import Accepts, Anything, Faults, Limit, Operations
from shardproof.protocol.registry import register
from shardproof.protocol.system import RankContext, System
from shardproof.scenario import Scenario

ACCEPTS = Accepts(
    "echo",
    model=Anything(),
    mesh=Anything(),
    program=Operations(("build", "step"), because="the echo writes no checkpoint"),
    faults=Faults(),
    seed=Anything(),
    limits=(Limit("one-rank", lambda scenario: scenario.mesh.world > 1, "the echo has one rank"),),
)
CONTRACT = Contract()
register(
    System(
        "echo", "right by definition", __name__,
        accepts_entry=":ACCEPTS", contract_entry=":CONTRACT", stored_entry="", rank=":EchoRank",
    )
)  # fmt: skip
ECHO = Scenario(system="echo", program="train", model="short")


class EchoRank:
    def __init__(self, context: RankContext) -> None:
        from shardproof.oracle import twin

        inputs, _ = context.contract.resolve(context.scenario)
        self._truth = twin.run(inputs)

    def build(self, op: Op) -> None:
        pass

    def step(self, op: Op) -> None:
        pass

    def observe(self, op: Op) -> Iterable[Record]:
        for key, value in self._truth.items():
            if key.op == op.index:
                yield whole(op.index, 0, key.role, key.fqn, value.dtype, value.shape, value.data)
