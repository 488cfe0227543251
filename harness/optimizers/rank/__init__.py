"""What runs on a rank: FSDP2 with the optimizer that is asked about, or the same optimizer on whole tensors."""

from __future__ import annotations

from harness.optimizers.arms import Arm
from harness.optimizers.rank.sharded import Sharded
from harness.optimizers.rank.whole import Whole
from harness.systems.protocol import RankContext


def rank_of(context: RankContext) -> Sharded | Whole:
    """What an arm asks for, with every operation that its programs have."""
    arm = Arm.read(context.directory)
    return Whole(context, arm) if arm.whole else Sharded(context, arm)
