"""The smallest set of scenarios in which every value of a system's walks occurs at least once: each checkpoint format,
option, optimizer and so on.

A walk over pairs takes hours; to see what a head no longer takes, each value has to occur once. The walks are those of
the widest space, so that formats which only a weekly run has are among them, on the meshes of the nightly one. They are
cured, as the walks are: a known defect must not hide what lies behind it.

*Verifies* nothing about combinations. *Does not verify*: walks over upgrades of the library; a head is not a release
that could be saved with and loaded by another one's number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardproof.protocol.system import System
from shardproof.scenario import Scenario, value_text
from shardproof.space.files import Walk, load_space
from shardproof.space.walk import once_each
from shardproof.versions import split_cures, with_cures

WIDE, NARROW = "weekly", "nightly"
"""The space whose walks have every value, and the one whose meshes are small and which leaves out what no cure takes
away."""

_UPGRADES = "load_version"


@dataclass(frozen=True)
class Lost:
    """A value of an axis that the release supports and the head does not. reason: what refuses it there."""

    axis: str
    value: str
    reason: str


def covering(system: System, version: str, release: str) -> tuple[Scenario, ...]:
    """Scenarios on a version that together have every value that its limits leave.

    Args:
        version: where they run. release: what that version calls itself, which limits are asked about.
    """
    found: dict[Scenario, None] = {}
    for walk in _walks(system):
        for scenario in once_each(replace(walk, version=with_cures(release, ""))):
            plain = any(rule.matches(scenario) for rule in walk.plain)
            found[replace(scenario, version=version if plain else with_cures(version, ""))] = None
    return tuple(found)


def lost(system: System, base: str, release: str) -> tuple[Lost, ...]:
    """The values that no scenario of a head has any more. base: the release that has them."""
    found: dict[tuple[str, str], Lost] = {}
    left = {value for walk in _walks(system) for value in _values(walk, release)}
    for walk in _walks(system):
        for (axis, value), scenario in _values(walk, base).items():
            if (axis, value) not in left:
                reason = system.refusal(replace(scenario, version=release)) or "a limit of ours"
                found.setdefault((axis, value), Lost(axis, value, reason))
    return tuple(found.values())


def _walks(system: System) -> Iterator[Walk]:
    """The walks of a system, small, without what no cure can take away, and without those over upgrades."""
    narrow = {walk.part: walk for walk in _of(NARROW, system)}
    for walk in _of(WIDE, system):
        nightly = narrow.get(walk.part, walk)
        if _UPGRADES not in walk.axes:
            small = {axis: texts for axis, texts in nightly.axes.items() if axis == "mesh"}
            yield replace(walk, axes={**walk.axes, **small}, leave_out=nightly.leave_out)


def _of(space: str, system: System) -> tuple[Walk, ...]:
    return load_space(space).on_systems([system.name]).walks


def _values(walk: Walk, release: str) -> dict[tuple[str, str], Scenario]:
    """(axis, value) → a supported scenario that has it."""
    found: dict[tuple[str, str], Scenario] = {}
    for scenario in once_each(replace(walk, version=with_cures(split_cures(release)[0], ""))):
        for axis in walk.axes:
            found.setdefault((axis, value_text(axis, getattr(scenario, axis))), scenario)
    return found
