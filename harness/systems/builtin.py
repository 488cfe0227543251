"""Registers the systems that ship with shardproof. Importing it imports no library under test."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

MODULES = (
    "harness.systems.torch_fsdp2",
    "harness.systems.megatron_core",
    "harness.systems.megatron_bridge",
    "harness.systems.automodel",
    "harness.systems.megatron_fsdp",
    "harness.systems.transformer_engine",
    "harness.reference.info",
)

for _module in MODULES:
    if find_spec(_module):
        importlib.import_module(_module)
