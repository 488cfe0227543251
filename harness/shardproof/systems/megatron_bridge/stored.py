"""What Megatron-Bridge's checkpoints hold: weights, and random generators, in a folder named after the iteration."""

from __future__ import annotations

from pathlib import Path

from shardproof.mechanisms.megatron.stored import MegatronStored
from shardproof.observe.logical import Logical
from shardproof.observe.record import Record
from shardproof.program import Op
from shardproof.scenario import Scenario
from shardproof.systems.megatron_bridge.contract import CONTRACT


class MegatronBridgeStored(MegatronStored):
    """What `save_checkpoint` writes without the optimizer."""

    def read(self, path: Path, op: Op, scenario: Scenario) -> list[Record]:
        return super().read(path / f"iter_{op.iteration:07d}", op, scenario)

    def stored_values(self, live: Logical, op: Op, scenario: Scenario) -> Logical:
        kept = super().stored_values(live, op, scenario)
        return {key: value for key, value in kept.items() if key.role in ("param", "buffer", "iteration")}


STORED = MegatronBridgeStored(CONTRACT)
