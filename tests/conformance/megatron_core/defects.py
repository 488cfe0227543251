"""A plugin: `megatron-core-defective` has a defect of the library in its ranks (`defective.py`); a scenario's seed says
which. With any other seed it is Megatron-Core as it is. Imports no library, so that the parent can import it too.
"""

from __future__ import annotations

from shardproof.protocol.registry import register
from shardproof.systems.megatron_core import SYSTEM

from tests.conformance.variants import with_ranks

REBINDS, LOSES, OFFLOADS_NOTHING, FORGETS, CUTS_ELSEWHERE = 101, 102, 103, 104, 105

DEFECTIVE = register(
    with_ranks(SYSTEM, "tests.conformance.megatron_core.defective:Defective", "megatron-core-defective")
)
