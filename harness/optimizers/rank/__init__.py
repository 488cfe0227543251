"""What runs on a rank: FSDP2 with the optimizer that is asked about, or the same optimizer on whole tensors."""

from __future__ import annotations

from harness.optimizers.arms import Arm
from harness.optimizers.rank.sharded import Sharded
from harness.optimizers.rank.whole import Whole
from harness.systems.protocol import RankContext, RankSystem


def rank_of(context: RankContext) -> RankSystem:
    """The `RankSystem` that an arm asks for."""
    arm = Arm.read(context.directory)
    return Whole(context, arm) if arm.whole else Sharded(context, arm)
