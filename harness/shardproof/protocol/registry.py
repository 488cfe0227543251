"""The systems that are known: every package below `shardproof.systems`, and what plugins register.

Nothing lists the built-in ones by name. A package with a `SYSTEM` is one, so that adding a system changes no file of
the core.
"""

from __future__ import annotations

import importlib
import pkgutil

from shardproof import models, systems
from shardproof.errors import A_TRAINER, TWO_CHECKPOINTS, UsageError
from shardproof.oracle.contract import Contract
from shardproof.protocol.system import System
from shardproof.readers import vocabulary
from shardproof.scenario import Scenario

_SYSTEMS: dict[str, System] = {}
_discovered: list[str] = []


def register(system: System) -> System:
    """Make a system known under its name; a later registration of the same name replaces the earlier one. Returns what
    was given."""
    _SYSTEMS[system.name] = system
    if system.models_entry:
        models.provide(lambda: system.models)
    if _discovered and system.stored_entry:
        vocabulary.provide(lambda: [system.stored.vocabulary])
    return system


def forget(name: str) -> None:
    """Make a system unknown again, such as one trainer of several whose runs have nothing to do with one another."""
    _SYSTEMS.pop(name, None)


def system_named(name: str) -> System:
    """The registered system called `name`.

    Raises:
        UsageError: no system is registered under this name.
    """
    _discover()
    if name not in _SYSTEMS:
        if ":" in name:
            file = f"{name.partition(':')[0]}.py"
            raise UsageError.of("trainer", name, "a trainer whose file is named too", f"--plugin {file}")
        error = UsageError.of("system", name, sorted(_SYSTEMS), "torch-fsdp2")
        raise error.led_to(A_TRAINER, TWO_CHECKPOINTS)
    return _SYSTEMS[name]


def contract_of(scenario: Scenario) -> Contract:
    """The contract of a scenario's system."""
    return system_named(scenario.system).contract


def all_systems() -> tuple[System, ...]:
    """Every registered system: the built-in ones by name, then those of plugins."""
    _discover()
    return tuple(_SYSTEMS.values())


def _discover() -> None:
    """Import the built-in systems, once, before any plugin's: none of them imports a library under test."""
    if _discovered:
        return
    _discovered.append("done")
    later = dict(_SYSTEMS)
    _SYSTEMS.clear()
    for found in pkgutil.iter_modules(systems.__path__):
        if found.ispkg:
            register(importlib.import_module(f"{systems.__name__}.{found.name}").SYSTEM)
    _SYSTEMS.update(later)


models.provide(lambda: [model for system in all_systems() for model in system.models])
vocabulary.provide(lambda: [system.stored.vocabulary for system in all_systems() if system.stored_entry])
