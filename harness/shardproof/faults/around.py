"""What a boundary fault does: it performs an operation on one rank, with something going wrong around it."""

from __future__ import annotations

from collections.abc import Callable

from shardproof.program import Op
from shardproof.protocol.system import RankContext, RankSystem

Around = Callable[[Callable[[], None], Op, RankContext, RankSystem], None]
"""Is given what performs the operation, the operation, what the rank knows, and the system on that rank."""
