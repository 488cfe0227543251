"""A plugin: training scripts over FSDP2 that keep their random generators wrongly. Imports no library."""

from __future__ import annotations

from shardproof.protocol.registry import register
from shardproof.systems.torch_fsdp2 import SYSTEM

from tests.conformance.variants import with_ranks

FORGETS = register(with_ranks(SYSTEM, f"{__name__}_ranks:Forgets", "careless-forgets"))
RANK_0S = register(with_ranks(SYSTEM, f"{__name__}_ranks:Rank0s", "careless-rank-0s"))
