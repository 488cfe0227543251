"""A plugin that adds a fault of real ranks: a load that leaves the first parameter of one rank as it was."""

from __future__ import annotations

from shardproof.faults.boundary import BoundaryFault, Perform
from shardproof.plugins import register_boundary_fault
from shardproof.program import Op
from shardproof.protocol.system import RankContext, RankSystem


def _left_as_it_was(act: Perform, op: Op, context: RankContext, system: RankSystem) -> None:
    if op.kind != "load" or context.rank:
        act()
        return
    import torch

    param = system.state.optimizer.param_groups[0]["params"][0]  # type: ignore[attr-defined]
    local = getattr(param, "_local_tensor", param)
    before = local.detach().clone()
    act()
    with torch.no_grad():
        local.copy_(before)
    context.struck()


register_boundary_fault(
    BoundaryFault("boundary.left-as-it-was", "a load misses the first parameter of rank 0", "mismatch", _left_as_it_was)
)
