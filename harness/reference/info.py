"""The reference as the parent sees it: every scenario that the space allows, in lockstep, in one process."""

from __future__ import annotations

from harness.program import operations
from harness.scenario import Scenario
from harness.systems.protocol import Limit, SystemInfo, first_reason
from harness.systems.registry import register

CHECKPOINTS = ("gathered", "bucket_space", "model_space", "sharded")


def _fp16_gradients(scenario: Scenario) -> bool:
    """Whether the optimizer sees fp16 gradients, which torch's GradScaler, and so the twin, refuses to unscale."""
    policy = scenario.dtype
    return policy.storage == "fp16" and (scenario.sharding == "fully_shard" or policy.master in (None, "fp16"))


LIMITS = (
    Limit(
        "boundary-faults",
        lambda s: any(fault.startswith("boundary.") for fault in s.faults),
        "boundary faults strike real ranks; the reference runs in lockstep",
    ),
    Limit(
        "checkpoint",
        lambda s: s.checkpoint not in CHECKPOINTS,
        f"the reference has these checkpoint formats: {', '.join(CHECKPOINTS)}",
    ),
    Limit(
        "multi-tensor",
        lambda s: s.optimizer.impl == "multi_tensor",
        "FusedAdam and FusedSGD, which count steps by group, are stepped under the rules of the systems that have them",
    ),
    Limit(
        "sharding", lambda s: s.sharding == "zero2", "the reference reduces gradients as zero1 does, and has no zero2"
    ),
    Limit("options", lambda s: bool(s.options), "the reference has no switches of its own"),
    Limit("expert-parallel", lambda s: s.expert_parallel > 1, "the reference does not share experts out"),
    Limit(
        "scaler-fp16-gradients",
        lambda s: s.optimizer.loss_scale > 0 and _fp16_gradients(s),
        "torch's GradScaler refuses to unscale fp16 gradients",
    ),
    Limit(
        "fused-sgd-unfreeze",
        lambda s: (
            (s.optimizer.kind, s.optimizer.impl) == ("sgd", "fused")
            and s.optimizer.momentum != 0
            and "unfreeze" in operations(s.program)
        ),
        "torch's fused SGD, and so the twin, raises TypeError when some parameters of a group have no momentum yet",
    ),
)


def unsupported(scenario: Scenario) -> str | None:
    """Why the reference does not run a scenario, or None."""
    return first_reason(LIMITS, scenario)


INFO = register(
    SystemInfo(
        name="reference",
        doc="our full sharded optimizer in lockstep over simulated ranks (zero1, replicate and fully_shard)",
        world="lockstep",
        entry="harness.reference.system:run",
        unsupported=unsupported,
        limits=LIMITS,
    )
)
