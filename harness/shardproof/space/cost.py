"""What a scenario is expected to cost: seconds by system, world and number of sessions, from each system's `walk.toml`.

    [cost]
    session_s = [0.12, 0.18]         # one session (fresh ranks) on worlds of 1, 2 … ranks, with two scenarios at once
    repeats = 0.1                    # further runs of a scenario, which confirm failures: so many for each, on average
    [cost.extra_s]
    dcp-async = 0.05                 # added for a checkpoint format, before its options

A system that declares nothing counts `UNKNOWN_SESSION_S` a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from shardproof.program import changes, expand, sessions
from shardproof.protocol.registry import all_systems
from shardproof.scenario import Mesh, Scenario
from shardproof.space.files import walk_tables
from shardproof.tables import Table

UNKNOWN_SESSION_S = 1.0


class Sessions(NamedTuple):
    """What decides which sessions a scenario has. changes: whether the ranks that load have another dtype policy or
    release, and so are others."""

    mesh: Mesh
    load: str
    program: str
    changes: bool


@dataclass(frozen=True)
class CostModel:
    """Seconds with two scenarios at once on two cores.

    session_s: system → seconds of one session by world size, world 1 first. extra_s: system → checkpoint format →
    seconds. repeats: system → further runs of a scenario. A system without an entry counts `UNKNOWN_SESSION_S` a
    session, and each scenario once.
    """

    session_s: Mapping[str, tuple[float, ...]]
    extra_s: Mapping[str, Mapping[str, float]]
    repeats: Mapping[str, float]

    def estimate_s(self, scenario: Scenario) -> float:
        runs = Sessions(scenario.mesh, scenario.load, scenario.program, changes(scenario))
        key = scenario.system, runs, scenario.checkpoint
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._estimate_s(*key)
        return found

    def _estimate_s(self, system: str, runs: Sessions, checkpoint: str) -> float:
        by_world = self.session_s.get(system, (UNKNOWN_SESSION_S,))
        extra = self.extra_s.get(system, {}).get(checkpoint.partition("+")[0], 0.0)
        once = sum(by_world[min(world, len(by_world)) - 1] for world in _worlds(runs)) + extra
        return once * (1 + self.repeats.get(system, 0.0))

    @cached_property
    def _known(self) -> dict[tuple[str, Sessions, str], float]:
        return {}


@cache
def cost_model() -> CostModel:
    """The costs that systems declare."""
    tables = {system.name: walk_tables(system).get("cost", Table({}, "cost")) for system in all_systems()}
    tables = {name: table.only(("session_s", "extra_s", "repeats")) for name, table in tables.items()}
    extra = {name: table.table("extra_s").content for name, table in tables.items()}
    return CostModel(
        {name: table.numbers("session_s", (UNKNOWN_SESSION_S,)) for name, table in tables.items()},
        {name: {form: float(seconds) for form, seconds in own.items()} for name, own in extra.items()},
        {name: table.positive("repeats", or_zero=True) for name, table in tables.items() if "repeats" in table},
    )


@cache
def _worlds(runs: Sessions) -> tuple[int, ...]:
    """The world size of each session."""
    scenario = Scenario(
        mesh=runs.mesh, load=runs.load, program=runs.program, load_version="newest" if runs.changes else "same"
    )
    return tuple(ops[0].mesh.world for ops in sessions(expand(scenario)))
