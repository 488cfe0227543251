"""The rank side of `shardproof optimizer`: the given optimizer under FSDP2, or on whole tensors for comparison."""

from __future__ import annotations

from shardproof.optimizers.arms import Arm
from shardproof.optimizers.rank.sharded import Sharded
from shardproof.optimizers.rank.unsharded import Whole
from shardproof.protocol.system import RankContext


def rank_of(context: RankContext) -> Sharded | Whole:
    """What an arm asks for, with every operation that its programs have."""
    arm = Arm.read(context.directory)
    return Whole(context, arm) if arm.whole else Sharded(context, arm)
