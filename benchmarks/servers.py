"""How a server for a scenario's system is started: with its overlay, variant and warm-up, as the laboratory does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardproof.protocol.registry import all_systems
from shardproof.protocol.releases import package_of
from shardproof.scenario import Scenario
from shardproof.world.environments import VARIANT
from shardproof.world.interpreter import interpreter
from shardproof.world.overlay import build

ROOT = Path(__file__).resolve().parents[1]


def server_options(scenario: Scenario) -> dict[str, Any]:
    """Arguments of `ForkServer`. A system of a plugin may be registered in the server only."""
    system = next((system for system in all_systems() if system.name == scenario.system), None)
    if system is None:
        return {"path_prefix": [ROOT], "warm_up": []}
    warm_up = [system.entry(system.warm_up)] if system.warm_up else []
    if not system.package:
        return {"path_prefix": [ROOT], "warm_up": warm_up}
    overlay = build(package_of(system), scenario.version, interpreter(None))
    return {
        "path_prefix": [*overlay.paths, ROOT],
        "warm_up": warm_up,
        "env": {**overlay.environment, VARIANT: system.variant(scenario)},
    }
