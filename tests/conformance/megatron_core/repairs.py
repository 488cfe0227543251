"""A plugin: Megatron-Core with one repair each (`repaired.py`). Imports no library, so that the parent can import it.

megatron-core-keep-order and -rebuild-map are the two ways to repair issue 2777 of NVIDIA/Megatron-LM, -refresh-copies
is what its pull request 5071 does, and -keep-zeros guards the emulated FusedAdam against scales of zero.
"""

from __future__ import annotations

from shardproof.protocol.registry import register
from shardproof.systems.megatron_core import SYSTEM

from tests.conformance.variants import with_ranks

REPAIRED = {
    repair: register(with_ranks(SYSTEM, f"tests.conformance.megatron_core.repaired:{kind}", f"megatron-core-{repair}"))
    for repair, kind in {
        "keep-order": "KeepOrder",
        "rebuild-map": "RebuildMap",
        "refresh-copies": "RefreshCopies",
        "keep-zeros": "KeepZeros",
    }.items()
}
"""Repair → the system with it."""
