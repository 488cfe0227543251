"""What Megatron-Bridge's checkpoints hold: weights, and random generators, in a folder named after the iteration."""

from __future__ import annotations

from pathlib import Path

from harness.mechanisms.megatron.stored import MegatronStored
from harness.observe.logical import Logical
from harness.observe.record import Record
from harness.program import Op
from harness.scenario import Scenario
from harness.systems.megatron_bridge.contract import CONTRACT


class MegatronBridgeStored(MegatronStored):
    """What `save_checkpoint` writes without the optimizer."""

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        return super().read(path / f"iter_{op.iteration:07d}", op, scenario)

    def kept(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        kept = super().kept(live, op, scenario)
        return {key: value for key, value in kept.items() if key.role in ("param", "buffer", "iteration")}


STORED = MegatronBridgeStored(CONTRACT)
