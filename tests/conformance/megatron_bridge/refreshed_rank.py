"""The ranks of `megatron-bridge-refreshed`."""

from __future__ import annotations

import torch
from shardproof.mechanisms.megatron.rank.observe import owned_parts
from shardproof.program import Op
from shardproof.systems.megatron_bridge.rank import Rank


class Refreshed(Rank):
    """Every copy that the optimizer holds, master or host copy, is refreshed after Bridge's load."""

    @torch.no_grad()
    def load_model_only(self, op: Op) -> None:
        super().load_model_only(op)
        for part in owned_parts(self.state):
            shard = self.state.root.get_parameter(part.fqn).view(-1)[part.start : part.start + part.length]
            for copy in (part.held, part.stepped):
                copy.view(-1).copy_(shard)
