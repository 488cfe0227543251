"""Cures of what crashes and full disks make of checkpoints: which a stack may have, and that each does what it says.

*Verifies*: in CI that each applies to the library that is installed, and names a stack and a trial; nightly, that the
trial's outcome is as bad as ever on the plain library and that no trial of its kind comes to that with all cures.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from shardproof.errors import UsageError
from shardproof.issues import cures
from shardproof.issues.cures import Cure
from shardproof.protocol.registry import all_systems
from shardproof.resilience.call_faults import strikes_of
from shardproof.resilience.planned_trials import cases_like
from shardproof.resilience.run import _made, prepared
from shardproof.resilience.stack_cures import cured, shown_by_stacks, stacks_named
from shardproof.resilience.stacks import Stack, all_stacks
from shardproof.resilience.states import crash_states
from shardproof.world.interpreter import interpreter

traced = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
CURES = [(system.name, cure) for system in all_systems() for cure in shown_by_stacks(system)]


def shown(cure: Cure) -> tuple[Stack, str]:
    """The stack and the trial that show it."""
    (words,) = cure.shown_by
    name, trial = words.split()
    return all_stacks()[name], trial


@pytest.mark.parametrize(("system", "cure"), CURES)
def test_each_applies_and_says_what_shows_it(system: str, cure: Cure) -> None:
    stack, trial = shown(cure)
    assert stack.system == system
    assert "@" in trial
    (asked,) = stacks_named((f"{stack.name}+cured:{cure.id}",))
    found = cured(asked, (), Path(interpreter().site))
    assert found is not None
    assert (found.applied, dict(found.left)) == ((cure.id,), {})
    assert all(text for text in found.sources.values())


def test_cured_stacks_are_asked_for_by_name() -> None:
    assert {cure.id for _, cure in CURES} >= {"stale-metadata", "sync-before-flush", "thread-error"}
    (every,) = stacks_named(("dcp-files+cured",))
    found = cured(every, (), Path(interpreter().site))
    assert found is not None
    assert {"stale-metadata", "sync-before-flush", "thread-error"} <= set(found.applied)
    assert (every.name, every.cured) == ("dcp-files+cured", "")
    assert cured(all_stacks()["dcp-files"], (), Path("/nowhere")) is None


@pytest.mark.parametrize("name", ["torch-save+cured", "dcp+cured:nothing", "nothing+cured"])
def test_cures_that_there_are_not_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="given"):
        stacks_named((name,))


def test_cures_of_stacks_are_no_cures_of_scenarios() -> None:
    for system in all_systems():
        assert not {cure.id for cure in shown_by_stacks(system)} & {cure.id for cure in cures.available(system)}


def outcomes(stack: Stack, label: str, *, only: bool) -> set[str]:
    """What the trials of a label's kind come to, or that of the label alone."""
    kind = label.partition("@")[0]
    with prepared(stack, 60.0) as ready:
        of_kind = {state.label for state in crash_states(ready.source.trace) if state.kind == kind}
        of_kind |= {strike.label for strike in strikes_of(ready.source.trace, stack.ranks) if strike.kind == kind}
        every = [case for each in sorted(of_kind) for case in cases_like(each, ready.source, 0) if case.label == each]
        wanted = [case for case in every if not only or case.label == label]
        return {_made(ready, ready.bench.lanes[0], case).outcome for case in wanted}


@traced
@pytest.mark.nightly
@pytest.mark.parametrize(("system", "cure"), CURES)
def test_each_takes_away_what_shows_it(system: str, cure: Cure) -> None:
    stack, trial = shown(cure)
    (outcome,) = outcomes(stack, trial, only=True)
    assert outcome in ("silent", "lied", "error")
    (healed,) = stacks_named((f"{stack.name}+cured",))
    assert outcome not in outcomes(healed, trial, only=False)
