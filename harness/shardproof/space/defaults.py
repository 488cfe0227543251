"""Fills in the axes that a scenario file leaves out, and finds the nearest scenario that a system accepts.

Every axis has a default that is common to all systems (`Scenario()`). A system need not take it: Megatron-Core refuses
`sharding = "fully_shard"`, every system has checkpoint formats of its own. So each also has a plain scenario that it is
known to pass, in its `conformance.toml` (`shardproof.faults.plain_scenario.plain_scenario`), and *its* axes stand in
for those that a file leaves out, as few of them as it takes for the system to accept the scenario. For example, a file
that says `system = "megatron-core"` and nothing else becomes `sharding=zero1`, `checkpoint=dp_zero`.

Two things follow. What a file states is never changed. And a scenario that ran with the common defaults still has them,
and so the id that it always had.

This happens where files are read and `--set` is applied (`shardproof.space.files.Space.scenarios`), not in `Scenario`,
which knows no system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from shardproof.faults.plain_scenario import plain_scenario
from shardproof.protocol.registry import system_named
from shardproof.scenario import Scenario
from shardproof.space.constraints import constraints_on, impossible

Axes = Mapping[str, str]
"""Axis → canonical text."""

KEPT = ("system", "version", "faults")
"""Axes that are never proposed to be changed: without them it would be another question."""

MOST_DROPPED = 3
"""So many stated axes are given up in every combination; beyond that, all of them."""

_LAST_RESORT = ("model", "mesh", "program")
"""Axes of which the common default is kept longest: they say what is tested, the others how."""


def completed(stated: Axes) -> Scenario:
    """The scenario of a file that states these axes.

    One that the system refuses however its defaults stand in has those that `nearest` has, so that what is said against
    it is said of what was stated.

    Raises:
        UsageError: an unknown system, axis or value.
    """
    return _filled(stated) or nearest(stated).with_axes(stated)


def nearest(stated: Axes) -> Scenario:
    """The scenario that runs and differs from what is stated in as few axes as possible, of the same system. An axis
    that is given up has the value of the system's plain scenario, or is as if it had been left out."""
    plain = plain_scenario(system_named(Scenario.from_axes(stated).system))
    own = _own_defaults(plain)
    axes = [axis for axis in stated if axis not in KEPT]
    for dropped in _subsets(axes, MOST_DROPPED):
        kept = {axis: text for axis, text in stated.items() if axis not in dropped}
        stand_in = {axis: own[axis] for axis in dropped if axis in own}
        for tried in ({**kept, **stand_in}, kept) if stand_in else (kept,):
            found = _filled(tried)
            if found:
                return found
    return plain


def is_accepted(scenario: Scenario) -> bool:
    """Whether a scenario has one right answer, and its system runs it."""
    return impossible(scenario) is None and system_named(scenario.system).refusal(scenario) is None


def _filled(stated: Axes) -> Scenario | None:
    """The scenario that states these axes and has the fewest of its system's own defaults; None where it is refused
    with any of them. A default under which something stated no longer matters does not count: with a program that never
    goes to the load mesh, any `load` could be had."""
    scenario = Scenario.from_axes(stated)
    own = _own_defaults(plain_scenario(system_named(scenario.system)))
    chosen = _subsets([axis for axis in own if axis not in stated])
    idle = _idle(scenario)
    found = (scenario.with_axes({axis: own[axis] for axis in choice}) for choice in chosen)
    return next((each for each in found if is_accepted(each) and _idle(each) <= idle), None)


def _idle(scenario: Scenario) -> set[str]:
    """The ids of constraints that rule a scenario out as a repetition, because an axis has no effect in the
    scenario."""
    return {c.id for c in constraints_on(scenario) if c.repeats and c.excludes(scenario)}


def _own_defaults(plain: Scenario) -> Axes:
    """The axes on which a system's plain scenario differs from the common defaults."""
    texts = plain.axis_values(only_changed=True)
    return {axis: texts[axis] for axis in sorted(texts, key=_LAST_RESORT.__contains__) if axis not in KEPT}


def _subsets(axes: Sequence[str], most: int | None = None) -> Iterator[tuple[str, ...]]:
    """Every choice of axes, the smallest first; of those of more than `most` axes only the largest."""
    for size in range(len(axes) + 1):
        if most is None or size <= most or size == len(axes):
            yield from combinations(axes, size)
