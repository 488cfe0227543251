"""The axes of a scenario as a reader means them. A trainer's cell has axes of its own, such as `precision=bf16`.

A scenario folds them into one text of `options`, where an axis at its first value is not named. A page that shows or
compares axes needs each by itself, with the first value in words. That value stands in the trainer's file; where the
file is not known, as on the machine of a reader, it is called `first value`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardproof.errors import UsageError
from shardproof.program import is_arms
from shardproof.protocol.registry import system_named
from shardproof.scenario import Scenario

TRAINER_AXES = ("system", "version", "device", "program", "faults", "seed")
"""The axes of every scenario that mean something to a trainer."""

FIRST = "first value"

COLUMNS = ("standing", "verdict", "release", "cause", "issue", "seen")
"""What a page calls its other columns."""

FirstValues = tuple[tuple[str, str], ...]
"""The axes of one trainer, each with its first value."""


def first_values(scenarios: Iterable[Scenario]) -> dict[str, FirstValues]:
    """System → its own axes with their first values, of the trainers among the scenarios' systems."""
    found: dict[str, dict[str, str]] = {}
    for scenario in scenarios:
        if is_arms(scenario.program):
            if scenario.system not in found:
                found[scenario.system] = dict(_declared(scenario.system))
            for axis in words_of(scenario):
                found[scenario.system].setdefault(axis, FIRST)
    return {system: tuple(axes.items()) for system, axes in found.items()}


def axis_texts(scenario: Scenario, first: FirstValues) -> dict[str, str]:
    """Axis → text of its value. Of a trainer's cell these are the axes that mean something to a trainer, and its own.

    Args:
        first: what `first_values` has of the scenario's system; empty for a system that is no trainer.
    """
    texts = scenario.axis_values()
    if not is_arms(scenario.program):
        return texts
    own = {**dict(first), **words_of(scenario)}
    return {**{axis: texts[axis] for axis in TRAINER_AXES}, **{own_name(axis): text for axis, text in own.items()}}


def words_of(scenario: Scenario) -> dict[str, str]:
    """The axes of a trainer's cell that are not at their first value."""
    parted = (word.partition("=") for word in scenario.options)
    return {axis: text for axis, _, text in parted}


def own_name(axis: str) -> str:
    """What a page calls an axis of a trainer: its name, unless the page uses this name already."""
    return f"{axis} of the trainer" if axis in (*TRAINER_AXES, *COLUMNS) else axis


def _declared(system: str) -> Mapping[str, str]:
    try:
        return system_named(system).first_values
    except UsageError:
        return {}
