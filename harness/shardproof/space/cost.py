"""What a scenario is expected to cost: seconds by system, world and number of sessions, from each system's `walk.toml`.

    [cost]
    session_s = [0.12, 0.18]         # one session (fresh ranks) on worlds of 1, 2 … ranks, with two scenarios at once
    repeats = 0.1                    # further runs of a scenario, which confirm failures: so many for each, on average
    [cost.extra_s]
    dcp-async = 0.05                 # added for a checkpoint format, before its options

A system that declares nothing counts `UNKNOWN_SESSION_S` a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

from shardproof.program import LOAD_AXES, expand, is_arms, is_other, related_mesh, sessions
from shardproof.protocol.registry import all_systems
from shardproof.scenario import Mesh, Scenario
from shardproof.space.files import walk_tables
from shardproof.tables import Table

UNKNOWN_SESSION_S = 1.0
SESSIONS_OF_ARMS = 7
"""About how many sessions the arms of a trainer's cell take."""

_DECIDES = attrgetter("system", "checkpoint", "mesh", "load", "program", *LOAD_AXES)
"""The axes that decide what a scenario costs."""


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
        return self.estimates_s([scenario])[0]

    def estimates_s(self, scenarios: Iterable[Scenario]) -> list[float]:
        """The seconds of each of many."""
        return [self._known[key] for key in map(_DECIDES, scenarios)]

    @cached_property
    def _known(self) -> _Known:
        return _Known(self)


class _Known(dict[tuple[Any, ...], float]):
    """What is decided by axes (`_DECIDES`) → seconds; worked out when first asked for."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def __missing__(self, key: tuple[Any, ...]) -> float:
        system, checkpoint, mesh, load, program, *loads = key
        if is_arms(program):
            found = self[key] = UNKNOWN_SESSION_S * SESSIONS_OF_ARMS
            return found
        by_world = self._costs.session_s.get(system, (UNKNOWN_SESSION_S,))
        extra = self._costs.extra_s.get(system, {}).get(checkpoint.partition("+")[0], 0.0)
        once = 0.0
        for world in _worlds(mesh, load, program, _any_other(*loads)):
            once += by_world[min(world, len(by_world)) - 1]
        found = self[key] = (once + extra) * (1 + self._costs.repeats.get(system, 0.0))
        return found


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
def _any_other(*loads: object) -> bool:
    """Whether the ranks that load have another dtype policy, model, optimizer or release."""
    return any(map(is_other, loads))


@cache
def _worlds(mesh: Mesh, load: str, program: str, others: bool) -> list[int]:
    """The world size of each session. others: `_any_other`."""
    target = related_mesh(mesh, load) or mesh
    return [(target if loads else mesh).world for loads in _loading(program, target != mesh, others)]


@cache
def _loading(program: str, moves: bool, others: bool) -> tuple[bool, ...]:
    """For each session of a program whether it starts on a load mesh that is another one. moves: whether there is such
    a mesh."""
    load, version = "grow" if moves else "same", "newest" if others else "same"
    scenario = Scenario(mesh=Mesh(), load=load, program=program, load_version=version)
    return tuple(ops[0].mesh != scenario.mesh for ops in sessions(expand(scenario)))
