"""A plugin: `megatron-fsdp-quiet` is Megatron-FSDP whose ranks are observed after operation 5 only."""

from __future__ import annotations

from collections.abc import Iterable

from harness.observe.record import Record
from harness.program import Op
from harness.systems.megatron_fsdp import SYSTEM
from harness.systems.megatron_fsdp.rank import Rank
from harness.systems.registry import register
from tests.conformance.variants import with_ranks


class Quiet(Rank):
    def observe(self, op: Op) -> Iterable[Record]:
        return super().observe(op) if op.index == 5 else ()


register(with_ranks(SYSTEM, f"{__name__}:Quiet", "megatron-fsdp-quiet"))
