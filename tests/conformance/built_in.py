"""The systems that ship with shardproof, whatever else a test has registered."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from shardproof import systems
from shardproof.protocol.system import System

BUILT_IN: tuple[System, ...] = tuple(
    import_module(f"{systems.__name__}.{found.name}").SYSTEM
    for found in pkgutil.iter_modules(systems.__path__)
    if found.ispkg
)
