"""A plugin: recipes over NeMo Automodel that keep their random generators wrongly. Imports no library."""

from __future__ import annotations

from shardproof.protocol.registry import register
from shardproof.systems.automodel import SYSTEM

from tests.conformance.variants import with_ranks

FORGETS = register(with_ranks(SYSTEM, f"{__name__}_ranks:Forgets", "automodel-forgets"))
RANK_0S = register(with_ranks(SYSTEM, f"{__name__}_ranks:Rank0s", "automodel-rank-0s"))
