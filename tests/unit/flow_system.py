"""A system that is right by definition: its one rank observes what the twin says. For tests of the whole flow.

`tests.unit.flow_faults`, a plugin for servers, makes its ranks and its judges fail.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.observe.record import Record, whole
from harness.program import Op
from harness.scenario import Scenario
from harness.systems.protocol import RankContext, SystemInfo
from harness.systems.registry import register


def unsupported(scenario: Scenario) -> str | None:
    if scenario.mesh.world > 1:
        return "the echo has one rank"
    return "the echo writes no checkpoint" if scenario.program != "train" else None


INFO = register(SystemInfo("echo", "right by definition", "fork", "tests.unit.flow_system:EchoRank", unsupported))
ECHO = Scenario(system="echo", program="train", model="short")


class EchoRank:
    def __init__(self, context: RankContext) -> None:
        from harness.judge import twin_axes
        from harness.oracle import twin

        self._truth = twin.run(twin_axes(context.scenario))

    def build(self, op: Op) -> None:
        pass

    def step(self, op: Op) -> None:
        pass

    def observe(self, op: Op) -> Iterable[Record]:
        for key, value in self._truth.items():
            if key.op == op.index:
                yield whole(op.index, 0, key.role, key.fqn, value.dtype, value.shape, value.data)
