"""Shrinking: from a failing scenario to the simplest one that fails in the same way.

A nightly finds a defect in a scenario such as `model=zoo dtype=mixed/reduce=fp32 mesh=2x2x2 optimizer=adamw/clip=1.0
checkpoint=full+cpu_offload program=twice`, of which the defect needs two things. A maintainer wants to see those two.

There is one *order* of scenarios, from simple to complicated (`weight`). Fewest axes that are not at a default come
first: an axis at its default tells the reader that it does not matter, so that a model named there is one that the
defect needs. After that come fewer ranks, fewer operations, fewer parts of values, and a smaller model. A default is
the scenario's own or, of a system that cannot run there, that of its plain scenario (`conformance.toml`): Megatron's
optimizer wants `sharding=zero1`, and a scenario that says so says nothing about the defect.

There is one *question*: does a scenario fail with the same signature, on the same release with the same cures? Of a
trainer's cell its first failing arm counts. Passes propose scenarios that are simpler than the one in hand: an axis at
its default, an axis without one of its parts, a smaller model, a smaller mesh, a program without some of its
operations; at last two of these axes at once, since one may hide behind the other: a dtype of masters needs a sharding
that has masters. The first that fails in the same way is taken in hand. It ends when no pass has a proposal left, or
when the time is up; whatever is in hand then is a scenario that fails.

Every scenario is asked about once. What the system refuses, or what cannot be run at all, counts as another failure.
The time that the result's own confirmation will take is kept back from the search.

*Verifies*: by a confirmed run at the end, that the result fails as the original did. *Does not verify*: that nothing
simpler fails. A defect that needs three changes at once, each of which hides it, stays where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from math import prod
from typing import Any, TextIO

from shardproof.errors import UsageError
from shardproof.faults.plain_scenario import plain_scenario
from shardproof.models import model_spec, zoo
from shardproof.program import ARMS, expand, is_arms, load_mesh, meshes, operations
from shardproof.protocol.registry import system_named
from shardproof.result import Result, describe
from shardproof.scenario import AXES, Mesh, Scenario
from shardproof.space.constraints import impossible
from shardproof.verdict import Verdict

FIXED = ("system", "version", "device", "faults")
"""Axes that say what is under test, and stay as they are."""

SIZED = ("mesh", "program")
"""Axes of which the smallest value is the plain one, whatever a system's plain scenario has."""

_PARTED = ("dtype", "optimizer")
"""Axes whose value has parts with defaults of their own."""

CONFIRMED = 2
"""How many runs the confirmation of a failure takes."""

Weight = tuple[int, int, int, int, int, int, str]


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
    parts = sum(_parts_changed(scenario, axis) for axis in scenario.axis_values(only_changed=True) if axis not in FIXED)
    elements = sum(prod(parameter.spec.shape) for parameter in spec.params)
    world = max(mesh.world for mesh in meshes(scenario))
    steps = len(expand(scenario) if is_arms(scenario.program) else operations(scenario.program))
    return len(needed(scenario)), world, steps, parts, len(spec.params), elements, str(scenario)


def _parts_changed(scenario: Scenario, axis: str) -> int:
    """How many parts of an axis that is not at its default are not at theirs."""
    value, default = getattr(scenario, axis), getattr(Scenario(), axis)
    if axis in _PARTED:
        return sum(getattr(value, part.name) != getattr(default, part.name) for part in fields(value))
    return 1 + scenario.axis_text(axis).count("+")


def needed(scenario: Scenario) -> dict[str, str]:
    """The axes that are at no default, with their values: what a failure needs, if nothing simpler fails. A program is
    no setting; its length counts for itself."""
    changed = scenario.axis_values(only_changed=True)
    plain = _plain(scenario.system).axis_values()
    return {
        axis: text
        for axis, text in changed.items()
        if axis not in FIXED and axis != "program" and (axis in SIZED or text != plain[axis])
    }


@cache
def _plain(system: str) -> Scenario:
    return plain_scenario(system_named(system))


def shrink(
    first: Result,
    attempt: Callable[[Scenario], Result],
    confirm: Callable[[Scenario], Result],
    limit_s: float,
    on_simpler: Callable[[Scenario], None] = lambda scenario: None,
) -> Shrunk:
    """The simplest scenario found that fails like `first`.

    Args:
        attempt: runs a scenario once. confirm: runs one as often as a verdict needs.
        limit_s: seconds that it may take, with the confirmation at the end.
        on_simpler: is called with every simpler scenario that is taken in hand.

    Raises:
        UsageError: `first` is no failure that could come again.
    """
    if not first.verdict.is_failure or not first.signature:
        form = "shardproof shrink with the id of a mismatch, a crash or a hang"
        raise UsageError.of("ID", f"{first.id}, {first.verdict.value}", "a failure that was reproduced", form)
    search = _Search(first, attempt, time.monotonic() + limit_s, on_simpler)
    search.run()
    in_hand = search.in_hand
    last = first if in_hand == first.scenario else confirm(in_hand)
    if face(last) != face(first):  # what came once did not come again
        last = first
    return Shrunk(last, search.tried, search.complete)


def face(result: Result) -> str:
    """What two failures must share to be the same: the signature. Of a trainer's cell it is what the first failing arm
    shows, since the arms behind it are what shrinking may leave out."""
    arm = result.failed_arm
    if arm is None or not result.verdict.is_failure:
        return result.signature
    of_arm = {index for index, (session, _) in enumerate(result.operations) if session == arm.name}
    own = [d for d in result.differences if d.key.op in of_arm]
    first = min((d.key.op for d in own), default=None)
    shown = sorted({f"{result.kind_of(first)}: {describe(d)}" for d in own if d.key.op == first})
    error = result.error.type if result.error is not None and result.error.op in of_arm else ""
    return f"{result.system} {arm.name.partition(' ')[0]} {arm.verdict}: {', '.join(shown)} {error}"


MOST_SHRUNK = 5
"""How many new causes one run shrinks: each takes minutes, and a run with more of them has one cause that shows in many
ways, or broke as a whole."""


class NewCauses:
    """The new failures of a walk: the simplest of each signature.

    Args:
        limits_s: system → seconds to search for a simpler one; nothing is looked for without any.
        stream: where it is told which ones are looked for; None for nowhere.
    """

    def __init__(self, limits_s: Mapping[str, float], stream: TextIO | None = None) -> None:
        self._limits_s, self._stream, self._done = limits_s, stream, set[str]()
        self._simplest: dict[str, Result] = {}

    def add(self, result: Result) -> None:
        """Take note of a result."""
        self._done.add(result.id)
        repeats = result.verdict.is_failure and result.verdict is not Verdict.NONDETERMINISTIC
        planted = bool(result.scenario.faults)
        wanted = self._limits_s.get(result.scenario.system, 0) > 0
        if not (repeats and wanted) or planted or result.known_issue is not None:
            return
        other = self._simplest.get(result.signature)
        if other is None or weight(result.scenario) < weight(other.scenario):
            self._simplest[result.signature] = result

    def shrunk(
        self, attempt: Callable[[Scenario], Result], confirm: Callable[[Scenario], Result]
    ) -> tuple[Result, ...]:
        """The simplest scenarios found, of those that were not run already. attempt, confirm: as of `shrink`."""
        chosen = list(self._simplest.values())[:MOST_SHRUNK]
        if len(self._simplest) > len(chosen):
            self._tell(f"{len(self._simplest)} new causes, of which {MOST_SHRUNK} are shrunk")
        found = []
        for first in chosen:
            limit_s = self._limits_s[first.scenario.system]
            self._tell(f"shrinking {first.id}, for up to {limit_s:.0f} s: {first.signature}")
            last = shrink(first, attempt, confirm, limit_s).result
            if last.id not in self._done:
                found.append(replace(last, behind=first.behind, shrunk_from=first.id))
        return tuple(found)

    def _tell(self, line: str) -> None:
        if self._stream is not None:
            print(line, file=self._stream, flush=True)


class _Search:
    """The scenario in hand, what has been asked about, and the time that is left."""

    def __init__(
        self, first: Result, attempt: Callable[[Scenario], Result], end: float, on_simpler: Callable[[Scenario], None]
    ) -> None:
        self.in_hand, self.tried, self.complete = first.scenario, 0, False
        self._face, self._attempt, self._end, self._on_simpler = face(first), attempt, end, on_simpler
        self._seen, self._slowest_s = {first.scenario}, 0.0

    def run(self) -> None:
        """Go through the passes until none has anything new to propose."""
        before = None
        while before != self.in_hand:
            before = self.in_hand
            for proposals in PASSES:
                while self._taken(proposals):
                    pass
                if self._over():
                    return
        self.complete = True

    def _over(self) -> bool:
        """Whether one more attempt, and the confirmation of what is found, would end too late."""
        return time.monotonic() + (1 + CONFIRMED) * self._slowest_s >= self._end

    def _fails(self, scenario: Scenario) -> bool:
        """Whether a scenario fails as the first one did."""
        began = time.monotonic()
        self.tried += 1
        found = face(self._attempt(scenario)) == self._face
        self._slowest_s = max(self._slowest_s, time.monotonic() - began)
        return found

    def _taken(self, proposals: Callable[[Scenario], Iterator[Scenario]]) -> bool:
        """Whether one of a pass's proposals was taken in hand."""
        bound = weight(self.in_hand)
        for scenario in proposals(self.in_hand):
            if scenario in self._seen or not _simpler(scenario, bound):
                continue
            if self._over():
                return False
            self._seen.add(scenario)
            if self._fails(scenario):
                self.in_hand = scenario
                self._on_simpler(scenario)
                return True
        return False


def _simpler(scenario: Scenario, bound: Weight) -> bool:
    """Whether a scenario is simpler than the bound, and can be run at all."""
    try:
        return weight(scenario) < bound and impossible(scenario) is None
    except UsageError:
        return False


def _defaults(scenario: Scenario) -> Iterator[Scenario]:
    """Every axis at its default, one at a time; then at the system's."""
    for axis, values in _default_values(scenario).items():
        for value in values:
            yield replace(scenario, **{axis: value})


def _default_values(scenario: Scenario) -> dict[str, list[Any]]:
    """Axis → its default and the system's, of the axes that are at neither, or at the second."""
    found: dict[str, list[Any]] = {}
    for axis in AXES:
        plains = (Scenario(),) if axis in SIZED else (Scenario(), _plain(scenario.system))
        values = list(dict.fromkeys(getattr(plain, axis) for plain in plains))
        if axis not in FIXED and getattr(scenario, axis) != values[0]:
            found[axis] = [value for value in values if value != getattr(scenario, axis)]
    return found


def _pairs(scenario: Scenario) -> Iterator[Scenario]:
    """Two axes at a default at once."""
    for (one, its), (other, others) in combinations(_default_values(scenario).items(), 2):
        for value, another in product(its, others):
            yield replace(scenario, **{one: value, other: another})


def _parts(scenario: Scenario) -> Iterator[Scenario]:
    """Simpler variants of a scenario: for every axis with several parts, such as `mesh` or `dtype`, one part reset to
    its default, or one word removed."""
    for axis in _PARTED:
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
    """What runs after a move to another mesh, on that mesh alone; every mesh of fewer ranks, with the load that there
    is and with none; then other loads from the same mesh."""
    words = [] if is_arms(scenario.program) else [*operations(scenario.program)]
    if "reshard" in words and (target := load_mesh(scenario)) is not None:
        behind = words[len(words) - words[::-1].index("reshard") :]
        yield replace(scenario, mesh=target, load="same", program=" ".join(behind))
    world = scenario.mesh.world
    sizes = sorted((m for m in product(range(1, world + 1), repeat=3) if prod(m) <= world), key=prod)
    for size in sizes:
        for load in dict.fromkeys(("same", scenario.load)):
            yield replace(scenario, mesh=Mesh(*size), load=load)
    for load in ("1x1x1", "1x2x1", "1x1x2", "1x3x1"):
        yield replace(scenario, load=load)


def _programs(scenario: Scenario) -> Iterator[Scenario]:
    """The program without a run of its operations, long runs first; of a trainer, fewer arms and fewer steps."""
    if is_arms(scenario.program):
        yield from _fewer_arms(scenario)
        return
    words = operations(scenario.program)
    for length in range(len(words) - 1, 0, -1):
        for start in range(len(words) - length + 1):
            yield replace(scenario, program=" ".join((*words[:start], *words[start + length :])))


def _fewer_arms(scenario: Scenario) -> Iterator[Scenario]:
    """A trainer's program with one kind of session and those that this one is compared with, and with fewer steps."""
    names = {op.arm: op.arm.partition(" ")[0] for op in expand(scenario)}
    kinds = list(dict.fromkeys({"other": "other-mesh"}.get(kind, kind) for kind in names.values()))
    _, *words = scenario.program.split()
    steps, wanted = [word for word in words if word.isdecimal()], [word for word in words if not word.isdecimal()]
    for kind in kinds:
        yield replace(scenario, program=" ".join([ARMS, *steps, kind]))
    yield replace(scenario, program=" ".join([ARMS, "1", "1", *wanted]))


PASSES: tuple[Callable[[Scenario], Iterator[Scenario]], ...] = (
    _defaults, _meshes, _models, _programs, _parts, _pairs,
)  # fmt: skip
"""What proposes simpler scenarios. Those that can take much away with one run come first."""
