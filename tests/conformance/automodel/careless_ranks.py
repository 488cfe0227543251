"""The ranks of `careless.py`."""

from __future__ import annotations

import torch
from shardproof.program import Op
from shardproof.systems.automodel.generators import KEY
from shardproof.systems.automodel.rank import Rank


class Forgets(Rank):
    """Saves its generators, and loads none."""

    def load(self, op: Op) -> None:
        generators, self.generators = self.generators, None
        super().load(op)
        self.generators = generators


class Rank0s(Rank):
    """Loads the generators of the first rank on all."""

    def load(self, op: Op) -> None:
        generators, self.generators = self.generators, None
        super().load(op)
        self.generators = generators
        folder = self.context.checkpoint_path(op) / KEY
        generators.load_state_dict(torch.load(folder / f"{KEY}_global_rank_0.pt"))
