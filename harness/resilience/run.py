"""All trials of a stack: save, record, work out the states, damage the result, load each, and count.

The steps of one stack, in a folder of its own that is gone afterwards: 1. The old state is saved, and taken to be on
disk for good. 2. The new state is saved and recorded. 3. The whole folder must load as the new state, or nothing that
follows would mean anything. 4. Another run saves both of its states elsewhere, for files of another run. 5. Every crash
state and then damages are loaded, up to the number of trials. Where there are more crash states than half of the
trials, reordered ones are left out as the seed draws them; the scorecard says how many there are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UsageError
from harness.resilience.corruptions import Damage, Folders, damaged
from harness.resilience.events import Trace, Tree, tree_of
from harness.resilience.stacks import Stack
from harness.resilience.states import KINDS, State, crash_states
from harness.resilience.steps import ZEROS
from harness.resilience.trial import Bench, HostError, Known, Outcome, Verdict, classify

FIRST, OLD, NEW = 1, 2, 3
"""The generations that a trial has to do with. There is one before the old one, since some stacks remove it."""
MOST_REPLAYED = 100_000
"""So many damages are gone through to find one by its label."""
OWN, OTHER = 1, 2
"""Training runs, whose states differ in everything."""


@dataclass(frozen=True)
class Case:
    """A folder to load. label: what replays it. what: how it came to be."""

    label: str
    kind: str
    crash: bool
    what: str
    tree: Tree


@dataclass(frozen=True)
class Tried:
    """A trial that was made."""

    label: str
    kind: str
    crash: bool
    what: str
    outcome: Outcome
    why: str


@dataclass
class Found:
    """All that the trials of one stack showed. states: how many crash states there are, tried or not."""

    stack: Stack
    steps: int
    syncs: int
    states: int
    tried: list[Tried] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """A stack that is ready to be tried."""

    bench: Bench
    known: Known
    trace: Trace
    folders: Folders


@contextmanager
def prepared(stack: Stack, deadline_s: float) -> Iterator[Prepared]:
    """A stack with its two states saved, the second one recorded.

    Raises:
        HostError: it cannot save, or not load what it saved. TraceError: its save cannot be recorded.
    """
    with Bench(stack, deadline_s, _libraries(stack)) as bench:
        folder, other = bench.root / "own", bench.root / "other"
        folder.mkdir()
        other.mkdir()
        first = bench.save(folder, FIRST, OWN)
        old = bench.save(folder, OLD, OWN)
        before = tree_of(folder)
        new, trace = bench.record(folder, NEW, OWN)
        after = tree_of(folder)
        bench.save(other, FIRST, OTHER)
        bench.save(other, OLD, OTHER)
        known = Known(old, new, bench.save(other, NEW, OTHER), first)
        for tree, wanted in ((before, "old"), (after, "new")):
            if (said := classify(bench.load(tree), known)).outcome != wanted:
                raise HostError(f"stack {stack.name} does not load its {wanted} state whole: {said.outcome} {said.why}")
        yield Prepared(bench, known, trace, Folders(after, before, tree_of(other)))


def _libraries(stack: Stack) -> Sequence[Path]:
    """Folders with what a stack needs beside torch, installed on the spot."""
    from harness.world.interpreter import interpreter
    from harness.world.overlay import install

    return [install(stack.requires, interpreter())] if stack.requires else []


def cases(ready: Prepared, trials: int, seed: int) -> tuple[list[Case], int]:
    """The folders to load, and how many crash states there are in all."""
    crashes = [_of_crash(state, ready.trace) for state in crash_states(ready.trace)]
    damages = list(damaged(ready.folders, seed, max(trials // 2, trials - len(crashes))))
    return [*_drawn(crashes, trials - len(damages), seed), *map(_of_damage, damages)], len(crashes)


def _drawn(crashes: Sequence[Case], most: int, seed: int) -> list[Case]:
    """As many of the crash states, in their order; those of the last kind, the most numerous one, are drawn last."""
    first = [index for index, case in enumerate(crashes) if case.kind != KINDS[-1]]
    last = [index for index, case in enumerate(crashes) if case.kind == KINDS[-1]]
    draw = random.Random(seed)
    chosen = draw.sample(first, min(len(first), most))
    chosen += draw.sample(last, min(len(last), most - len(chosen)))
    return [crashes[index] for index in sorted(chosen)]


def _of_crash(state: State, trace: Trace) -> Case:
    events = trace.events
    where = (
        f"right before event {state.crash}, {events[state.crash]}" if state.crash < len(events) else "after the save"
    )
    gone = [
        index for index in range(state.crash) if index not in state.kept and not events[index].kind.startswith("sync")
    ]
    parts = [f"of {events[index]}, {size} bytes" for index, size in state.kept.items() if size >= 0]
    parts += [f"zeros of {events[index]}" for index, size in state.kept.items() if size == ZEROS]
    parts += (
        [f"not on disk: {'; '.join(str(events[index]) for index in gone[:4])}{' …' if gone[4:] else ''}"]
        if gone
        else []
    )
    return Case(state.label, state.kind, True, ", ".join([f"crash {where}", *parts]), state.tree)


def _of_damage(damage: Damage) -> Case:
    return Case(damage.label, damage.kind, False, damage.what, damage.tree)


def try_stack(
    stack: Stack, trials: int, seed: int, deadline_s: float, told: Callable[[int, int], None] = lambda done, of: None
) -> Found:
    """Make the trials of a stack.

    Args:
        told: is told how many are done, of how many.

    Raises:
        HostError, TraceError: as `prepared`.
    """
    with prepared(stack, deadline_s) as ready:
        every, states = cases(ready, trials, seed)
        syncs = sum(event.kind.startswith("sync") for event in ready.trace.events)
        found = Found(stack, len(ready.trace.events), syncs, states)
        for number, case in enumerate(every, 1):
            said = _made(ready, case)
            found.tried.append(Tried(case.label, case.kind, case.crash, case.what, said.outcome, said.why))
            told(number, len(every))
        return found


def replay(stack: Stack, label: str, seed: int, deadline_s: float) -> tuple[Tried, Trace]:
    """Make one trial again, by its label; also gives the record that it was worked out of.

    Raises:
        UsageError: the stack's trials have none of that label.
    """
    with prepared(stack, deadline_s) as ready:
        for case in _until(label, ready, seed):
            if case.label == label:
                said = _made(ready, case)
                return Tried(case.label, case.kind, case.crash, case.what, said.outcome, said.why), ready.trace
    form = "shardproof resilience torch-save --trial killed@1"
    raise UsageError.of("--trial", label, f"a trial of stack {stack.name} with seed {seed}", form)


def _until(label: str, ready: Prepared, seed: int) -> Iterator[Case]:
    """All cases among which one of that label would be."""
    if "@" in label:
        yield from (_of_crash(state, ready.trace) for state in crash_states(ready.trace))
    else:
        yield from map(_of_damage, damaged(ready.folders, seed, MOST_REPLAYED))


def _made(ready: Prepared, case: Case) -> Verdict:
    return classify(ready.bench.load(case.tree), ready.known)
