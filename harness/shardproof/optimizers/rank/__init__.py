"""What runs on a rank: FSDP2 with the optimizer that is asked about, or the same optimizer on whole tensors."""

from __future__ import annotations

from shardproof.optimizers.arms import Arm
from shardproof.optimizers.rank.sharded import Sharded
from shardproof.optimizers.rank.unsharded import Whole
from shardproof.protocol.system import RankContext


def rank_of(context: RankContext) -> Sharded | Whole:
    """What an arm asks for, with every operation that its programs have."""
    arm = Arm.read(context.directory)
    return Whole(context, arm) if arm.whole else Sharded(context, arm)
