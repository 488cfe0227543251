"""A plugin: `torch-zero-forgetful` is the example with a defect. Its load restores the parameters, and nothing of the
optimizer."""

from __future__ import annotations

from shardproof.plugins import register_system

from tests.conformance.torch_zero import SYSTEM
from tests.conformance.variants import with_ranks

FORGETFUL = register_system(with_ranks(SYSTEM, f"{__name__}_rank:Forgetful", "torch-zero-forgetful"))
