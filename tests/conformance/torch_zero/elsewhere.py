"""Plugins: the example with checkpoints of a form that no reader knows, and without a defect."""

from __future__ import annotations

from shardproof.plugins import register_system

from tests.conformance.torch_zero import SYSTEM
from tests.conformance.variants import with_ranks

OTHER_FILE = register_system(with_ranks(SYSTEM, f"{__name__}_rank:OtherFile", "torch-zero-other-file"))
OTHER_KEY = register_system(with_ranks(SYSTEM, f"{__name__}_rank:OtherKey", "torch-zero-other-key"))
