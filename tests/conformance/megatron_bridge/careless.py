"""A plugin: a training script over Megatron-Bridge that seeds its random generators wrongly. Imports no library."""

from __future__ import annotations

from shardproof.protocol.registry import register
from shardproof.systems.megatron_bridge import SYSTEM

from tests.conformance.variants import with_ranks

ALL_AS_RANK_0 = register(with_ranks(SYSTEM, f"{__name__}_ranks:AllAsRank0", "bridge-careless-rank-0s"))
SAVES_NONE = register(with_ranks(SYSTEM, f"{__name__}_ranks:SavesNone", "bridge-careless-saves-none"))
