"""A plugin: systems that are broken on purpose, one for each check of the conformance kit (`test_kit.py`).

Each is FSDP2 with one mistake in the part of a system that its author writes. Imports no library, so that the parent
can import it too.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from shardproof.observe.logical import Logical
from shardproof.protocol.accepts import (
    EVERY_STEP,
    Accepts,
    Anything,
    Constraint,
    Faults,
    LibraryError,
    Limit,
    Only,
    Operations,
    Parts,
)
from shardproof.protocol.registry import register
from shardproof.scenario import DTypePolicy, Scenario
from shardproof.systems.torch_fsdp2 import SYSTEM
from shardproof.systems.torch_fsdp2.contract import Fsdp2Contract

from tests.conformance.variants import with_parts

RANKS = f"{__name__}_ranks"

# Ranks: what they do and what they say of it

MEDDLES = register(with_parts(SYSTEM, "broken-meddles", rank=f"{RANKS}:Meddles"))
OMITS = register(with_parts(SYSTEM, "broken-omits", rank=f"{RANKS}:Omits"))
UNTYPED = register(with_parts(SYSTEM, "broken-untyped", rank=f"{RANKS}:Untyped"))
IDLE_LOAD = register(with_parts(SYSTEM, "broken-idle-load", rank=f"{RANKS}:IdleLoad"))
PARROT = register(with_parts(SYSTEM, "broken-parrot", rank=f"{RANKS}:Parrot"))
UNEVEN = register(with_parts(SYSTEM, "broken-uneven", rank=f"{RANKS}:Uneven"))


class Believes(Fsdp2Contract):
    """Promises whatever was observed of the second moments."""

    def completed(self, truth: Logical, observed: Logical, scenario: Scenario, done: AbstractSet[int]) -> Logical:
        seen = {key: value for key, value in observed.items() if key.role == "exp_avg_sq" and key.where == "live"}
        return {**truth, **seen}


BELIEVER = Believes()
BELIEVES = register(with_parts(SYSTEM, "broken-believes", contract_entry=f"{__name__}:BELIEVER"))

# Allow-lists and limits


class Careless:
    """Refuses nothing, and is not `Anything`, which says so."""

    text = "what one likes"

    def refuses(self, value: Any) -> bool:
        return False


class FirstLetters:
    """Knows values by how they begin."""

    text = "fp…"

    def refuses(self, value: Any) -> bool:
        return str(value)[:1] not in ("f", "n", "N")


UNDECLARED_ACCEPTS = Accepts(
    "broken-undeclared",
    mesh=Anything(),
    sharding=Careless(),
    dtype=Parts(DTypePolicy, storage=Only("fp32"), param=FirstLetters()),
)
UNDECLARED = register(with_parts(SYSTEM, "broken-undeclared", accepts_entry=f"{__name__}:UNDECLARED_ACCEPTS"))


def _reads_everything(scenario: Scenario) -> bool:
    """Looks at a scenario as a whole, whose text has every axis in it."""
    return "nowhere" in str(scenario.axis_values())


WIDE_ACCEPTS = Accepts(
    "broken-wide",
    mesh=Anything(),
    limits=(Limit("wide-limit", _reads_everything, "for a reason"),),
    constraints=(Constraint("wide-constraint", "for a reason", _reads_everything),),
)
WIDE = register(with_parts(SYSTEM, "broken-wide", accepts_entry=f"{__name__}:WIDE_ACCEPTS"))


def _several(scenario: Scenario) -> bool:
    return scenario.microbatches > 1


CLAIMS_ACCEPTS = Accepts(
    "broken-claims",
    model=Anything(),
    mesh=Anything(),
    microbatches=Anything(),
    program=Operations(EVERY_STEP),
    faults=Faults(),
    limits=(
        Limit("several", _several, "so we say", "nowhere",
              LibraryError("RuntimeError", "one microbatch", "step", {"microbatches": "2", "program": "build step"})),
        Limit("other-operation", lambda s: s.model == "short", "so we say", "nowhere",
              LibraryError("KeyError", "'short'", "step", {"model": "short", "program": "build"})),
        Limit("no-scenario", lambda s: s.model == "tied", "so we say", "nowhere",
              LibraryError("RuntimeError", "tied", "build")),
        Limit("of-another", lambda s: s.model == "many", "so we say", "nowhere",
              LibraryError("RuntimeError", "many", "build", {"model": "groups"})),
    ),
)  # fmt: skip
CLAIMS = register(
    with_parts(SYSTEM, "broken-claims", rank=f"{RANKS}:RefusesShort", accepts_entry=f"{__name__}:CLAIMS_ACCEPTS")
)
