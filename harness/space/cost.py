"""What a scenario is expected to cost: seconds by system, world and number of sessions, from `scenarios/costs.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from harness.program import expand, sessions
from harness.scenario import Mesh, Scenario, load_toml

UNKNOWN_SESSION_S = 1.0


@dataclass(frozen=True)
class CostModel:
    """Seconds with two scenarios at once on two cores.

    session_s: system → seconds of one session by world size, world 1 first. extra_s: system → checkpoint format →
    seconds. A system without an entry counts `UNKNOWN_SESSION_S` a session.
    """

    session_s: Mapping[str, tuple[float, ...]]
    extra_s: Mapping[str, Mapping[str, float]]

    def estimate_s(self, scenario: Scenario) -> float:
        by_world = self.session_s.get(scenario.system, (UNKNOWN_SESSION_S,))
        worlds = _worlds(scenario.mesh, scenario.load, scenario.program)
        extra = self.extra_s.get(scenario.system, {}).get(scenario.checkpoint.partition("+")[0], 0.0)
        return sum(by_world[min(world, len(by_world)) - 1] for world in worlds) + extra


@cache
def cost_model() -> CostModel:
    """The costs that ship with shardproof."""
    document = load_toml(resources.files("scenarios").joinpath("costs.toml").read_text("utf-8"), "costs.toml")
    systems = {name: table for name, table in document.items() if isinstance(table, dict)}
    return CostModel(
        {name: tuple(map(float, table["session_s"])) for name, table in systems.items()},
        {name: table.get("extra_s", {}) for name, table in systems.items()},
    )


@cache
def _worlds(mesh: Mesh, load: str, program: str) -> tuple[int, ...]:
    """The world size of each session."""
    return tuple(ops[0].mesh.world for ops in sessions(expand(Scenario(mesh=mesh, load=load, program=program))))
