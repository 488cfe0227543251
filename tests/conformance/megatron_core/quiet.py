"""A plugin: `megatron-core-quiet` is Megatron-Core whose ranks are observed after operation 4 only."""

from __future__ import annotations

from collections.abc import Iterable

from harness.observe.record import Record
from harness.program import Op
from harness.systems.megatron_core import SYSTEM
from harness.systems.megatron_core.rank import Rank
from harness.systems.registry import register
from tests.conformance.variants import with_ranks


class Quiet(Rank):
    def observe(self, op: Op) -> Iterable[Record]:
        return super().observe(op) if op.index == 4 else ()


register(with_ranks(SYSTEM, f"{__name__}:Quiet", "megatron-core-quiet"))
