"""The cells of a trainer: what its axes say, as scenarios, and back.

A *cell* has one value of each axis. As a scenario it names the axes that are not at their first value, as words of
`options` such as `optimizer=muon`; so an axis that is added to a trainer renames no cell. The other axes of a scenario
keep their defaults: what they mean is decided inside of the trainer. For example, the cell `mesh=2x2 optimizer=muon` of
`my_trainer.py` is

    system=my_trainer:Mine  program=arms  options=mesh=2x2+optimizer=muon
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from math import prod
from random import Random

import numpy as np

from shardproof.errors import UsageError
from shardproof.program import ARMS
from shardproof.scenario import Scenario
from shardproof.space.covering import Cover
from shardproof.space.feasible import Feasible
from shardproof.trainer.described import MOST_CELLS, Described

MESH_AXIS = "mesh"
MESH = "2"
"""The mesh of a trainer without an axis `mesh`."""


def values_of(trainer: Described, scenario: Scenario) -> dict[str, str]:
    """Axis → the text of its value in a scenario's cell."""
    given = dict(word.split("=", 1) for word in scenario.options)
    return {axis: given.get(axis, texts[0]) for axis, texts in trainer.axes.items()}


def mesh_of(trainer: Described, scenario: Scenario) -> str:
    """The mesh of a scenario's cell, as the trainer writes it."""
    return values_of(trainer, scenario).get(MESH_AXIS, MESH)


def scenario_of(trainer: Described, values: Mapping[str, str], **axes: str) -> Scenario:
    """The scenario of a cell. axes: of the scenario, such as `version`."""
    words = [f"{axis}={text}" for axis, text in values.items() if text != trainer.axes[axis][0]]
    given = {"system": trainer.system, "program": ARMS, "options": "+".join(words)}
    return Scenario.from_axes(given | axes)


def settings_of(trainer: Described, texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What `--set AXIS=V,V` says of a trainer's axes.

    Raises:
        UsageError: another form, or an axis or a value that the trainer does not have.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        axis, equals, listed = text.partition("=")
        form = "--set mesh=2" if not trainer.axes else f"--set {_example(trainer)}"
        if not equals or not listed or axis in found:
            raise UsageError.of("--set", text, "AXIS=VALUE[,VALUE], each axis once", form)
        if axis not in trainer.axes:
            raise UsageError.of(f"axis of {trainer.system}", axis, tuple(trainer.axes) or "none: it has no axes", form)
        values = tuple(dict.fromkeys(_split(listed)))
        if wrong := [value for value in values if not trainer.takes(axis, value)]:
            allowed = f"{', '.join(trainer.axes[axis])}; another value has to stand in `axes` of {trainer.file.name}"
            if axis in trainer.open:
                allowed = f"{', '.join(trainer.axes[axis])}, or another value without blanks and without +"
            raise UsageError.of(f"{axis} of {trainer.system}", wrong[0], allowed, form, trainer.axes[axis])
        found[axis] = values
    return found


def _split(listed: str) -> list[str]:
    """Values with commas between them; those inside of brackets belong to a value, as in `SGD(lr=1,momentum=0.9)`."""
    found, depth = [""], 0
    for letter in listed:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def _example(trainer: Described) -> str:
    axis, texts = next(iter(trainer.axes.items()))
    return f"{axis}={texts[-1]}"


def cells(
    trainer: Described, settings: Mapping[str, Sequence[str]], strength: int | None = None, seed: int = 0,
    sample: int | None = None,
) -> list[dict[str, str]]:  # fmt: skip
    """The cells that a selection asks for, the plainest first: every combination, or few that have every combination of
    `strength` axes; of these, where a `sample` is asked for, so many at most.

    Raises:
        UsageError: more than `MOST_CELLS` combinations.
    """
    axes = {axis: tuple(settings.get(axis, texts)) for axis, texts in trainer.axes.items()}
    number = prod(map(len, axes.values()))
    if number > MOST_CELLS:
        form = "--set AXIS=VALUE for some axes, or fewer values in `axes`"
        raise UsageError.of(f"cells of {trainer.system}", number, f"up to {MOST_CELLS}", form)
    if strength is None or strength >= len(axes):
        found = [dict(zip(axes, texts, strict=True)) for texts in product(*axes.values())]
    else:
        found = _covering(axes, strength, seed)
    if sample is None or sample >= len(found):
        return found
    return [found[place] for place in sorted(Random(seed).sample(range(len(found)), sample))]


def _covering(axes: Mapping[str, Sequence[str]], strength: int, seed: int) -> list[dict[str, str]]:
    """Few of the cells that have, of each `strength` axes, every combination that there is, the plainest first."""
    cover = Cover(Feasible(list(map(len, axes.values())), ()), list(combinations(range(len(axes)), strength)), seed)
    cover.start_from(tuple(range(len(axes))), np.zeros((1, len(axes)), np.int64))  # the plainest cell is always there
    cover.fill()
    rows = sorted(map(tuple, cover.rows.tolist()))
    return [{axis: texts[place] for (axis, texts), place in zip(axes.items(), row, strict=True)} for row in rows]
