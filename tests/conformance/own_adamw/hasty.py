"""A plugin: `own-adamw-hasty` is the example with a defect, which shows where a rank holds nothing of a parameter."""

from __future__ import annotations

from shardproof.plugins import register_system

from tests.conformance.own_adamw import SYSTEM
from tests.conformance.variants import with_ranks

HASTY = register_system(with_ranks(SYSTEM, f"{__name__}_rank:Hasty", "own-adamw-hasty"))
