"""A plugin: `megatron-bridge-refreshed` is Bridge whose load refreshes every copy that the optimizer holds."""

from __future__ import annotations

from shardproof.protocol.registry import register
from shardproof.systems.megatron_bridge import SYSTEM

from tests.conformance.variants import with_ranks

REFRESHED = register(
    with_ranks(SYSTEM, "tests.conformance.megatron_bridge.refreshed_rank:Refreshed", "megatron-bridge-refreshed")
)
