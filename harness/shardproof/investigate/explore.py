"""Stateful exploration: Hypothesis makes up programs and axes that nobody has written down, and shrinks what fails.

A walk takes the programs that have names, in every combination of axes. What it never tries is `build step save step
save load reload_params load step`: two saves in a row, a load twice, a refresh between. Here Hypothesis draws the
operations one after the other, of all that occur in the system's nightly walk, and beside them a scenario of that walk
with up to three of its axes at other values. What one draw leaves illegal (a load before any save) is left out, so that
taking one operation away, which is how Hypothesis shrinks, leaves a program.

Each drawn scenario is examined like any other: on the reference in lockstep, on a real library in real ranks, cured of
its known defects. Scenarios that a system refuses, that have no single right answer, or in which a load finds what it
restores because a step has changed no bit, are drawn again. So are those that the walk leaves out with a reason; where
the reason names programs, whose names mean nothing here, it holds of all programs. Hypothesis draws in rounds of
`ROUND` scenarios until the number, or the time, is spent. A scenario that fails is shrunk within the time that is left,
and only towards scenarios that fail with the same signature; then the search goes on, and failures of that signature
count as found.

*Verifies*: that no scenario of those drawn fails, or is `unknown`.
*Does not verify*: anything of what was not drawn; the same seed draws the same scenarios as long as the walk, and
Hypothesis' release, stay as they are.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, cast

from shardproof.errors import UsageError
from shardproof.investigate.shrink import shrink
from shardproof.program import BLIND, JOINS, KINDS, is_telling, operations, require_telling
from shardproof.scenario import Scenario
from shardproof.sequences import completion, joined_at_loads
from shardproof.space.constraints import impossible
from shardproof.space.files import LeaveOut, load_space
from shardproof.space.plan import Selection, make_plan
from shardproof.verdict import ExitStatus, Verdict

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.result import Result

ROUND = 100
"""Scenarios that Hypothesis draws at a time: what it learns of failures, it learns within a round."""

LONGEST = 14
"""Operations that are drawn for a program, of which those that are illegal are left out."""

CHANGED = 3
"""Axes of a scenario of the walk that get another value."""

FIXED = ("system", "version", "program", "faults", "device", "seed")
"""Axes that stay as the walk, or the program, has them."""


@dataclass
class Explored:
    """What an exploration came to.

    drawn: how many different scenarios were examined. programs: the different programs that they have. refused: how
    many more were drawn, and refused by the system, or would have shown nothing. failures: the simplest result of each
    signature. ended: whether the time was up before the number was reached. interrupted: whether the user did.
    """

    drawn: int = 0
    refused: int = 0
    programs: set[str] = field(default_factory=set)
    failures: dict[str, Result] = field(default_factory=dict)
    ended: bool = False
    interrupted: bool = False


def program_of(
    words: Sequence[str], *, overflows: bool = False, unfreezes: bool = False, moves: bool = False,
    accumulates: bool = False, remembers: bool = True, schedules: bool = False, overlaps: bool = False,
) -> str:  # fmt: skip
    """The legal program that drawn operations come to, beginning with a build; illegal ones are left out.

    Where gradients wait for their step, an operation that may not come before it has it come first; and where there is
    nothing to load, a load has something saved.

    Args:
        overflows: whether a step may overflow. unfreezes: whether the model has parameters that are trained later;
            then they join before the program ends, in the way that is drawn first. moves: whether the load relation
            leads anywhere. accumulates: whether a step has several microbatches, between which it can stop.
            remembers: whether the optimizer has a state of its own, which a load of it alone would restore.
            schedules: the same of a learning-rate schedule. overlaps: whether saves may be asynchronous.
    """
    joins = next((word for word in words if word in JOINS), JOINS[0]) if unfreezes else ""
    left_out = {word for word in JOINS if word != joins}
    left_out |= set() if overflows else {"overflow"}
    left_out |= set() if moves else {"reshard", "restart"}
    left_out |= set() if accumulates else {"accumulate"}
    left_out |= set() if remembers else {"load_optimizer_only"}
    left_out |= set() if schedules else {"load_schedule_only"}
    left_out |= set() if overlaps else {"begin_save"}
    made: list[str] = ["build"]
    for word in words:
        added = _WITH.get(word, (word,))
        ended = completion(made)
        for before in ((), ended, *((*ended, *first) for first in _FIRST.get(word, ()))):
            program = [*made, *before, *added]
            if word not in left_out and is_telling(program) and _joined_alike(program, joins):
                made = program
                break
    if joins and joins not in _since_build(made):
        made += completion(made)
        made.append(joins)
    return " ".join(made)


_WITH = {
    "reshard": ("reshard", "build"),
    "restart": ("restart", "build"),
    "load_model_only": ("load_model_only", "reload_params"),
    "load_previous_model": ("load_previous_model", "reload_params"),
    "replace_params": ("replace_params", "reload_params"),
    "begin_save": ("begin_save", "step", "finish_save"),
}
"""Operation → what goes with it."""


_FIRST = {
    "load": (("step",), ("save", "step")),
    "load_previous": (("step",), ("save", "step"), ("save", "step", "save", "step")),
    "load_previous_model": (("step",), ("save", "step"), ("save", "step", "save", "step")),
    "load_model_only": (("step",), ("save", "step")),
    "load_optimizer_only": (("step",), ("save", "step")),
    "load_schedule_only": (("step",), ("save", "step")),
    "save_kept": (("keep", "step"),),
    "recall": (("step",), ("keep", "step")),
}
"""Operation → what has to come before it where nothing is there that it could load, or nothing that it would change;
the least first. Without it nine of ten drawn programs load nothing."""


def _since_build(words: Sequence[str]) -> Sequence[str]:
    last = max(position for position, word in enumerate(words) if word == "build")
    return words[last + 1 :]


def _joined_alike(words: Sequence[str], joins: str) -> bool:
    """Whether parameters join once a build, and whether every load finds the groups that were there at its save."""
    if joins and _since_build(words).count(joins) > 1:
        return False
    if joins != "add_group":
        return True
    loads = joined_at_loads(words, (joins,))
    return all(then == now for word, then, now in loads if word != "load_model_only")


class Explorer:
    """One exploration of one system.

    Args:
        system: `NAME[@VERSION]`. examine: the result of a scenario. seed: of everything that is drawn. budget_s:
            when to end. examples: how many scenarios to examine at most. faults: planted in each of them.
        known: whether a failure is none to be found. on_failure: is called with a line for every new failure.
        on_scenario: is called with what was found so far, and the seconds that are left, after each scenario.
    """

    def __init__(
        self,
        system: str,
        examine: Callable[[Scenario], Result],
        *,
        seed: int = 0,
        budget_s: float = 60.0,
        examples: int | None = None,
        faults: Sequence[str] = (),
        known: Callable[[Result], bool] = lambda result: False,
        on_failure: Callable[[str], None] = lambda line: None,
        on_scenario: Callable[[Explored, float], None] = lambda found, left_s: None,
    ) -> None:
        self._base = _walk(system)
        self._values = _values(self._base)
        self._left_out = _left_out(system)
        self._drawn = {word for scenario in self._base for word in operations(scenario.program)}
        self._examine, self._seed, self._faults, self._on_failure = examine, seed, tuple(faults), on_failure
        self._on_scenario = on_scenario
        self._known = known
        self._examples, self._until = examples, time.monotonic() + budget_s
        self._results: dict[Scenario, Result | None] = {}
        self.found = Explored()

    def run(self) -> Explored:
        """Draw until the number or the time is spent, or until the user interrupts it."""
        number = 0
        try:
            while not self._over():
                self._round(number)
                number += 1
        except KeyboardInterrupt:
            self.found.interrupted = True
        self.found.ended = self._examples is not None and self.found.drawn < self._examples
        return self.found

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._until - time.monotonic())

    def _over(self) -> bool:
        spent = self._examples is not None and self.found.drawn >= self._examples
        return spent or not self.left_s

    def _round(self, number: int) -> None:
        """Let Hypothesis draw once; a failure leaves its simplest result in `found`."""
        from hypothesis import HealthCheck, Phase, given, seed, settings
        from hypothesis.errors import Flaky

        wanted: list[str] = []

        @seed(self._seed * 1_000_003 + number)
        @settings(
            max_examples=ROUND, database=None, deadline=None, phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
        )  # fmt: skip
        @given(self._scenarios())
        def every_scenario_passes(scenario: Scenario) -> None:
            result = self._result(scenario, shrinking=bool(wanted))
            if result is None:
                return
            signature = signature_of(result)
            if wanted and signature != wanted[0]:
                return
            if not wanted and signature in self.found.failures:
                return
            if not wanted:
                wanted.append(signature)
                self._on_failure(f"fails: {scenario}")
            self.found.failures[signature] = result
            raise _FailedError

        with suppress(_FailedError, Flaky):
            every_scenario_passes()

    def _result(self, scenario: Scenario, *, shrinking: bool) -> Result | None:
        """The result of a scenario that fails; None where it passes, is refused, or is not examined any more."""
        if scenario in self._results:
            return self._results[scenario]
        if self._over() and not (shrinking and self.left_s):
            return None
        result = self._examine(scenario)
        tells_nothing = result.verdict is Verdict.UNKNOWN and result.reason.endswith(BLIND)  # a step changed no bit
        if tells_nothing:
            self._results[scenario] = None
            self.found.refused += 1
            return None
        fails = result.verdict.is_failure or result.verdict is Verdict.UNKNOWN
        self._results[scenario] = result if fails and not self._known(result) else None
        if result.verdict is Verdict.UNSUPPORTED:
            self.found.refused += 1
        elif not shrinking:
            self.found.drawn += 1
            self.found.programs.add(scenario.program)
            self._on_scenario(self.found, self.left_s)
        return self._results[scenario]

    def _scenarios(self) -> SearchStrategy[Scenario]:
        """A Hypothesis strategy that draws a scenario of the walk and replaces its program and a few axes. Draws that
        violate a constraint are rejected."""
        from hypothesis import strategies as st

        words = tuple(kind for kind in KINDS if kind in self._drawn and kind not in _FOLLOW)

        def operations_of(length: int) -> SearchStrategy[list[str]]:
            return st.lists(st.sampled_from(words), min_size=length, max_size=length)

        changes = st.lists(st.sampled_from(sorted(self._values)).flatmap(self._change), max_size=CHANGED)
        drawn = st.builds(
            self._scenario, st.sampled_from(self._base), changes, st.integers(1, LONGEST).flatmap(operations_of)
        )
        return drawn.filter(bool).map(cast("Callable[[Scenario | None], Scenario]", lambda scenario: scenario))

    def _change(self, axis: str) -> SearchStrategy[tuple[str, str]]:
        from hypothesis import strategies as st

        return st.sampled_from(self._values[axis]).map(lambda value: (axis, value))

    def _scenario(self, base: Scenario, changes: Sequence[tuple[str, str]], words: Sequence[str]) -> Scenario | None:
        """A scenario of the walk, changed; None where it is impossible, or where nothing would be learned."""
        try:
            changed = base.with_axes(dict(changes))
            return self._with_program(changed, words)
        except UsageError:
            return None

    def _with_program(self, scenario: Scenario, words: Sequence[str]) -> Scenario | None:
        """A scenario with the program that words come to; without asynchronous saves where it cannot have them."""
        made = self._of_words(scenario, words, overlaps=True)
        return made or self._of_words(scenario, words, overlaps=False)

    def _of_words(self, scenario: Scenario, words: Sequence[str], *, overlaps: bool) -> Scenario | None:
        from shardproof.models import model_spec

        program = program_of(
            words,
            overflows=bool(scenario.optimizer.loss_scale),
            unfreezes=model_spec(scenario.model).has_later,
            moves=True,
            accumulates=scenario.microbatches > 1,
            remembers=scenario.optimizer.kind != "sgd" or bool(scenario.optimizer.momentum),
            schedules=scenario.optimizer.schedule != "none",
            overlaps=overlaps,
        )
        kinds = operations(program)
        still = replace(scenario, load="same") if not {"reshard", "restart"} & {*kinds} else scenario
        made = replace(still, program=program, faults=self._faults)
        require_telling(program)
        left_out = any(rule.matches(made, any_program=True) for rule in self._left_out.get(made.version, ()))
        return None if left_out or impossible(made) else made


_FOLLOW = ("reload_params", "finish_save")
"""Operations that are never drawn, since they belong to another one (`_WITH`)."""


class _FailedError(Exception):
    """Tells Hypothesis that a scenario fails."""


def signature_of(result: Result) -> str:
    """What tells failures apart: the signature, or of what is unknown the reason."""
    return result.signature or f"{result.verdict.value}: {result.reason.splitlines()[0] if result.reason else ''}"


def require_hypothesis() -> None:
    """Check that Hypothesis is installed, which shardproof needs for this alone.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise UsageError.of("hypothesis", "not installed", "the extra `explore`", "pip install 'shardproof[explore]'")


def simplest(result: Result, laboratory: Laboratory, left_s: float) -> Result:
    """The simplest scenario that fails in the same way, confirmed, as far as the time goes
    (`shardproof.investigate.shrink`)."""
    if result.verdict is Verdict.UNKNOWN or left_s <= 0:
        return result
    return shrink(
        result, lambda s: laboratory.examine_one(s, confirm=False), laboratory.examine_one, left_s, lambda s: None
    ).result


def progress_of(found: Explored, left_s: float) -> str:
    """How far an exploration is, in a line."""
    failures = len(found.failures)
    return f"{found.drawn} scenarios, {failures} failure{'s' * (failures != 1)}, {left_s:.0f} s left"


def report_of(system: str, found: Explored, seed: int) -> str:
    """The outcome in a line."""
    failures = len(found.failures)
    outcome = f"{failures} failure{'s' * (failures > 1)}" if failures else "none fails"
    early = ", interrupted" if found.interrupted else ", the time was up" if found.ended else ""
    tried = f"{found.drawn} scenarios with {len(found.programs)} programs, seed {seed}{early}"
    return f"{system}: {tried}: {outcome}"


def status_of(found: Explored, results: Sequence[Result]) -> ExitStatus:
    """The exit status that an exploration comes to."""
    if any(result.verdict is Verdict.UNKNOWN for result in results):
        return ExitStatus.HARNESS
    if results:
        return ExitStatus.FAILURE
    return ExitStatus.OK if found.drawn else ExitStatus.NOTHING_RUN


def to_json(found: Explored, results: Sequence[Result]) -> dict[str, object]:
    """The outcome for a program."""
    return {
        "drawn": found.drawn, "programs": len(found.programs), "refused": found.refused, "ended": found.ended,
        "failures": [result.to_json() for result in results],
    }  # fmt: skip


@cache
def _walk(system: str) -> tuple[Scenario, ...]:
    """The scenarios of a system's nightly walk, the plainest first; of a library with cures those that it is cured in.

    Raises:
        UsageError: there is no such system, or it has no walk.
    """
    plan = make_plan([load_space("nightly")], Selection(systems=(system,)))
    if not plan.supported:
        raise UsageError.of("SYSTEM", system, "a system with a nightly walk", "shardproof explore reference")
    cured = [scenario for scenario in plan.supported if scenario.cures is not None]
    return tuple(sorted(cured or plan.supported, key=_plainness))


def _left_out(system: str) -> dict[str, tuple[LeaveOut, ...]]:
    """Version, as a scenario has it → what the walks of the system over that version leave out."""
    found: dict[str, tuple[LeaveOut, ...]] = {}
    for walk in load_space("nightly").walks:
        if walk.system == system.partition("@")[0]:
            found[walk.version] = found.get(walk.version, ()) + walk.leave_out
    return found


def _plainness(scenario: Scenario) -> tuple[int, int, str]:
    return len(scenario.axis_values(only_changed=True)), scenario.mesh.world, scenario.id


def _values(scenarios: Sequence[Scenario]) -> Mapping[str, list[str]]:
    """Axis → the values that the walk has of it, those of plain scenarios first; only axes with several."""
    found: dict[str, dict[str, None]] = {}
    for axis, text in _texts(scenarios):
        found.setdefault(axis, {})[text] = None
    return {axis: list(values) for axis, values in found.items() if len(values) > 1 and axis not in FIXED}


def _texts(scenarios: Sequence[Scenario]) -> Iterator[tuple[str, str]]:
    for scenario in scenarios:
        yield from scenario.axis_values().items()
