"""How a server for a scenario's system is started: with its overlay, variant and warm-up, as the laboratory does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness.systems.builtin  # noqa: F401
from harness.releases import package
from harness.scenario import Scenario
from harness.systems.registry import all_systems
from harness.world.environments import VARIANT
from harness.world.interpreter import interpreter
from harness.world.overlay import build

ROOT = Path(__file__).resolve().parents[1]


def server_options(scenario: Scenario) -> dict[str, Any]:
    """Arguments of `ForkServer`. A system of a plugin may be registered in the server only."""
    info = next((info for info in all_systems() if info.name == scenario.system), None)
    if info is None or not info.package:
        return {"path_prefix": [ROOT], "warm_up": [info.warm_up] if info and info.warm_up else []}
    overlay = build(package(info.package), scenario.version, interpreter(None))
    return {
        "path_prefix": [*overlay.paths, ROOT],
        "warm_up": [info.warm_up],
        "env": {**overlay.environment, VARIANT: info.variant(scenario)},
    }
