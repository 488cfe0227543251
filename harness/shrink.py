"""Shrinking: from a failing scenario to the simplest one that fails in the same way.

A nightly finds a defect in a scenario such as `model=zoo dtype=mixed/reduce=fp32 mesh=2x2x2 optimizer=adamw/clip=1.0
checkpoint=full+cpu_offload program=twice`, of which the defect needs two things. A maintainer wants to see those two.

There is one *order* of scenarios, from simple to complicated (`weight`): fewer ranks come before everything, then
fewer operations, a smaller model, and fewer settings that are not their default. There is one *question*: does a
scenario fail with the same signature, on the same release with the same cures? Passes propose scenarios that are
simpler than the one in hand: an axis at its default, an axis without one of its parts, a smaller model, a smaller mesh,
a program without some of its operations. The first that fails in the same way is taken in hand. It ends when no pass
has a proposal left, or when the time is up; whatever is in hand then is a scenario that fails.

Every scenario is asked about once. What the system refuses, or what cannot be run at all, counts as another failure.

*Verifies*: by a confirmed run at the end, that the result fails as the original did. *Does not verify*: that nothing
simpler fails. A defect that needs two changes at once, each of which hides it, stays where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any

from harness.errors import UsageError
from harness.models import model_spec, zoo
from harness.program import meshes, operations
from harness.result import Result
from harness.scenario import AXES, Mesh, Scenario
from harness.space.constraints import impossible

FIXED = ("system", "version", "device", "faults")
"""Axes that say what is under test, and stay as they are."""

Weight = tuple[int, int, int, int, int, str]


@dataclass(frozen=True)
class Shrunk:
    """What shrinking came to.

    * result: of the simplest scenario found, confirmed.
    * tried: how many scenarios ran.
    * complete: whether no proposal was left; otherwise the time was up.
    """

    result: Result
    tried: int
    complete: bool


def weight(scenario: Scenario) -> Weight:
    """How complicated a scenario is, for comparing two of them; its text decides between equals.

    Raises:
        UsageError: the program is illegal, or its load has no mesh to go to.
    """
    spec = model_spec(scenario.model)
    changed = {axis: text for axis, text in scenario.axis_values(only_changed=True).items() if axis not in FIXED}
    settings = sum(1 + text.count("/") + text.count("+") for text in changed.values())
    elements = sum(prod(parameter.spec.shape) for parameter in spec.params)
    world = max(mesh.world for mesh in meshes(scenario))
    return world, len(operations(scenario.program)), len(spec.params), elements, settings, str(scenario)


def shrink(
    first: Result,
    attempt: Callable[[Scenario], Result],
    confirm: Callable[[Scenario], Result],
    limit_s: float,
    told: Callable[[Scenario], None] = lambda scenario: None,
) -> Shrunk:
    """The simplest scenario found that fails like `first`.

    Args:
        attempt: runs a scenario once. confirm: runs one as often as a verdict needs.
        limit_s: seconds after which no further scenario is begun.
        told: hears of every simpler scenario that is taken in hand.

    Raises:
        UsageError: `first` is no failure that could come again.
    """
    if not first.verdict.is_failure or not first.signature:
        form = "shardproof shrink with the id of a mismatch, a crash or a hang"
        raise UsageError.of("ID", f"{first.id}, {first.verdict.value}", "a failure that was reproduced", form)
    search = _Search(first, attempt, time.monotonic() + limit_s, told)
    search.run()
    in_hand = search.in_hand
    last = first if in_hand == first.scenario else confirm(in_hand)
    if last.signature != first.signature:  # what came once did not come again
        last = first
    return Shrunk(last, search.tried, search.complete)


class _Search:
    """The scenario in hand, what has been asked about, and the time that is left."""

    def __init__(
        self, first: Result, attempt: Callable[[Scenario], Result], end: float, told: Callable[[Scenario], None]
    ) -> None:
        self.in_hand, self.tried, self.complete = first.scenario, 0, False
        self._signature, self._attempt, self._end, self._told = first.signature, attempt, end, told
        self._seen = {first.scenario}

    def run(self) -> None:
        """Go through the passes until none has anything new to propose."""
        before = None
        while before != self.in_hand:
            before = self.in_hand
            for proposals in PASSES:
                while self._taken(proposals):
                    pass
                if time.monotonic() >= self._end:
                    return
        self.complete = True

    def _taken(self, proposals: Callable[[Scenario], Iterator[Scenario]]) -> bool:
        """Whether one of a pass's proposals was taken in hand."""
        bound = weight(self.in_hand)
        for scenario in proposals(self.in_hand):
            if scenario in self._seen or not _simpler(scenario, bound):
                continue
            if time.monotonic() >= self._end:
                return False
            self._seen.add(scenario)
            self.tried += 1
            if self._attempt(scenario).signature == self._signature:
                self.in_hand = scenario
                self._told(scenario)
                return True
        return False


def _simpler(scenario: Scenario, bound: Weight) -> bool:
    """Whether a scenario is simpler than the bound, and can be run at all."""
    try:
        return weight(scenario) < bound and impossible(scenario) is None
    except UsageError:
        return False


def _defaults(scenario: Scenario) -> Iterator[Scenario]:
    """Every axis at its default, one at a time."""
    plain = Scenario()
    for axis in AXES:
        if axis not in FIXED and getattr(scenario, axis) != getattr(plain, axis):
            yield replace(scenario, **{axis: getattr(plain, axis)})


def _parts(scenario: Scenario) -> Iterator[Scenario]:
    """Every axis that is made of parts with one of them at its default, or without one of its words."""
    for axis in ("dtype", "optimizer"):
        value: Any = getattr(scenario, axis)
        plain = type(value)()
        for part in fields(value):
            default = getattr(plain, part.name)
            if getattr(value, part.name) != default:
                with suppress(UsageError):  # some parts need each other
                    yield replace(scenario, **{axis: replace(value, **{part.name: default})})
    for word in scenario.options:
        yield replace(scenario, options=tuple(other for other in scenario.options if other != word))
    form, *switches = scenario.checkpoint.split("+")
    for switch in switches:
        yield replace(scenario, checkpoint="+".join([form, *(other for other in switches if other != switch)]))
    for number in range(1, scenario.microbatches):
        yield replace(scenario, microbatches=number)


def _models(scenario: Scenario) -> Iterator[Scenario]:
    """Every model, the smallest first."""
    yield from sorted((replace(scenario, model=name) for name in zoo()), key=weight)


def _meshes(scenario: Scenario) -> Iterator[Scenario]:
    """Every mesh of fewer ranks, with the load that there is and with none; then other loads from the same mesh."""
    world = scenario.mesh.world
    sizes = sorted((m for m in product(range(1, world + 1), repeat=3) if prod(m) <= world), key=prod)
    for size in sizes:
        for load in dict.fromkeys(("same", scenario.load)):
            yield replace(scenario, mesh=Mesh(*size), load=load)
    for load in ("1x1x1", "1x2x1", "1x1x2", "1x3x1"):
        yield replace(scenario, load=load)


def _programs(scenario: Scenario) -> Iterator[Scenario]:
    """The program without a run of its operations, long runs first."""
    words = operations(scenario.program)
    for length in range(len(words) - 1, 0, -1):
        for start in range(len(words) - length + 1):
            yield replace(scenario, program=" ".join((*words[:start], *words[start + length :])))


PASSES: tuple[Callable[[Scenario], Iterator[Scenario]], ...] = (_defaults, _meshes, _models, _programs, _parts)
"""What proposes simpler scenarios. Those that can take much away with one run come first."""
