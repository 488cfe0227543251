"""Systems that differ from a real one in the class of their ranks only: a library with a defect planted in it, one
that is repaired, one that is watched less often.

A plugin makes one with `with_ranks` and registers it; everything that the parent asks of a system (what it accepts,
what it promises, how its checkpoints are read) stays the original's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from harness.scenario import Scenario
from harness.systems.protocol import System


@dataclass(frozen=True)
class Variant(System):
    """ranks: `module:class` of its `RankSystem`, in full."""

    ranks: str = ""

    def entry(self, name: str) -> str:
        return self.ranks if name == self.rank else super().entry(name)


@dataclass(frozen=True)
class Unlimited(System):
    """A system that refuses nothing, so that its library is asked what it refuses."""

    def refusal(self, scenario: Scenario) -> str | None:
        return None


def with_ranks(system: System, ranks: str, name: str = "") -> Variant:
    """The system with another class of ranks, `module:class`, under a name of its own unless that is empty."""
    return Variant(**_values(system) | ({"name": name} if name else {}), ranks=ranks)


def without_limits(system: System) -> Unlimited:
    """The system with every scenario accepted."""
    return Unlimited(**_values(system))


def _values(system: System) -> dict[str, Any]:
    return {field.name: getattr(system, field.name) for field in fields(System)}
