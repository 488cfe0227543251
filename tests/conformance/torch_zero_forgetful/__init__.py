"""The worked example with a defect: its load restores the parameters, and nothing of the optimizer."""

from __future__ import annotations

from dataclasses import replace

from harness.oracle.contracts import Rules, declare
from harness.program import Op
from harness.systems.registry import register
from tests.conformance.torch_zero import INFO, ZeroRank

FORGETFUL = register(replace(INFO, name="torch-zero-forgetful", entry=f"{__name__}:Forgetful"))
declare(FORGETFUL.name, Rules(owner_groups=True))


class Forgetful(ZeroRank):
    def load(self, op: Op) -> None:
        self.load_model_only(op)
