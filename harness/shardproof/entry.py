"""Resolves entry points written `module:attribute`, by which systems, warm-ups and worker calls are named.

A text instead of an object lets the parent name what only a rank may import.
"""

from __future__ import annotations

import importlib
from typing import Any

from shardproof.errors import UsageError


def resolve(entry: str) -> Any:
    """The object that `module:attribute` names.

    Raises:
        UsageError: no colon in it, or the module has no such attribute. ImportError: as the module's import raises.
    """
    module, colon, attribute = entry.partition(":")
    if not colon:
        raise UsageError.of("entry", entry, "module:attribute", "shardproof.systems.torch_fsdp2.rank:Rank")
    found = importlib.import_module(module)
    if not hasattr(found, attribute):
        raise UsageError.of("entry", entry, f"an attribute of {module}", "shardproof.systems.torch_fsdp2.rank:Rank")
    return getattr(found, attribute)
