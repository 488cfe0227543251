"""A plugin: training scripts over Megatron-Core that keep their random generators wrongly. Imports no library."""

from __future__ import annotations

from shardproof.protocol.registry import register
from shardproof.systems.megatron_core import SYSTEM

from tests.conformance.variants import with_ranks

NO_TRACKER = register(with_ranks(SYSTEM, f"{__name__}_ranks:NoTracker", "megatron-careless-no-tracker"))
RANK_0S = register(with_ranks(SYSTEM, f"{__name__}_ranks:Rank0s", "megatron-careless-rank-0s"))
