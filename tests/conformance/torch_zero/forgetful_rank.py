"""One rank whose load forgets the optimizer."""

from __future__ import annotations

from shardproof.program import Op

from tests.conformance.torch_zero.rank import Rank


class Forgetful(Rank):
    def load(self, op: Op) -> None:
        self.load_model_only(op)
