"""A plugin: training scripts over TransformerEngine that keep its tracker of random generators wrongly. Imports no
library."""

from __future__ import annotations

from shardproof.protocol.registry import register
from shardproof.systems.transformer_engine import SYSTEM

from tests.conformance.variants import with_ranks

NO_TRACKER = register(with_ranks(SYSTEM, f"{__name__}_ranks:NoTracker", "te-careless-no-tracker"))
RANK_0S = register(with_ranks(SYSTEM, f"{__name__}_ranks:Rank0s", "te-careless-rank-0s"))
