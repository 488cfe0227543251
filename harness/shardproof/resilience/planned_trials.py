"""The trials planned for a stack, in order: damaged folders to load, and saves and loads that are struck by a fault.

A run has so many trials. Up to a quarter of them are strikes, up to half of them damages, and crash states take the
rest; what one of these does not need, the crash states get, and then the damages. Where there are more crash states or
strikes than places, some are left out as the seed draws them; the scorecard says how many there are.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shardproof.resilience.call_faults import DISK, RANKS, Strike, load_strikes_of, strikes_of
from shardproof.resilience.corruptions import KINDS as DAMAGES
from shardproof.resilience.corruptions import Damage, Folders, damaged
from shardproof.resilience.events import Call, Trace, Tree
from shardproof.resilience.states import KINDS as CRASHES
from shardproof.resilience.states import State, crash_states, states_called
from shardproof.resilience.steps import ZEROS
from shardproof.resilience.trial import TrialOutcome

MOST_REPLAYED = 100_000
"""So many damages are gone through to find one by its label."""

FAMILIES = {"crash": CRASHES, "damage": tuple(DAMAGES), "disk": DISK, "ranks": RANKS}
"""Kinds of trials: crashes, damage of a finished folder, errors of the disk, and what strikes one rank."""


@dataclass(frozen=True)
class PlannedTrial:
    """A trial to be made. `label` identifies the trial for a replay, and `what` describes it. `tree` is the folder
    content to load; a trial that strikes a running save or load has a `strike` instead."""

    label: str
    kind: str
    what: str
    tree: Tree | None = None
    strike: Strike | None = None


@dataclass(frozen=True)
class FinishedTrial:
    """A trial that was made."""

    label: str
    kind: str
    what: str
    outcome: TrialOutcome
    why: str


@dataclass(frozen=True)
class StackRecording:
    """What the cases of a stack are made of: its recorded save and load, its folders, and how many ranks save."""

    trace: Trace
    loads: Sequence[Call]
    folders: Folders
    ranks: int = 1


@dataclass(frozen=True)
class Counts:
    """How many crash states and strikes there are, tried or not."""

    states: int
    strikes: int


def family_of(kind: str) -> str:
    """The family of a kind."""
    return next(family for family, kinds in FAMILIES.items() if kind in kinds)


def cases(source: StackRecording, trials: int, seed: int) -> tuple[list[PlannedTrial], Counts]:
    """What to try, and how much there is."""
    crashes = [(state.label, state.kind) for state in crash_states(source.trace)]  # all trees at once are gigabytes
    strikes = list(_strikes(source))
    most = max(trials // 4, trials - len(crashes) - trials // 2)
    struck = _drawn(strikes, most, seed)
    left = trials - len(struck)
    damages = list(_damages(source, seed, max(trials // 2, left - len(crashes))))[:left]
    chosen = _crashes(_drawn_crashes(crashes, left - len(damages), seed), source)
    return [*chosen, *damages, *struck], Counts(len(crashes), len(strikes))


def cases_like(label: str, source: StackRecording, seed: int) -> Iterator[PlannedTrial]:
    """The planned trials among which a replay finds the trial with the given label: crashes for a label such as
    `killed@3`, strikes for other labels with `@`, and damage to a finished checkpoint otherwise."""
    if "@" not in label:
        return _damages(source, seed, MOST_REPLAYED)
    return _crashes({label}, source) if label.partition("@")[0] in CRASHES else _strikes(source)


def _crashes(labels: Collection[str], source: StackRecording) -> Iterator[PlannedTrial]:
    return (planned_crash(state, source.trace) for state in states_called(labels, source.trace))


def _damages(source: StackRecording, seed: int, most: int) -> Iterator[PlannedTrial]:
    return map(_of_damage, damaged(source.folders, seed, most))


def _strikes(source: StackRecording) -> Iterator[PlannedTrial]:
    for strike in (*strikes_of(source.trace, source.ranks), *load_strikes_of(source.loads)):
        yield PlannedTrial(strike.label, strike.kind, strike.what, strike=strike)


def _drawn(every: Sequence[PlannedTrial], most: int, seed: int) -> list[PlannedTrial]:
    """As many, in their order, of each kind about as many: a kind with few is not crowded out by one with many."""
    draw = random.Random(f"{seed} strikes")
    waiting: dict[str, list[int]] = {}
    for index, case in enumerate(every):
        waiting.setdefault(case.kind, []).append(index)
    for places in waiting.values():
        draw.shuffle(places)
    chosen: list[int] = []
    for kind in _round(waiting):
        if len(chosen) >= most:
            break
        chosen.append(waiting[kind].pop())
    return [every[index] for index in sorted(chosen)]


def _round(waiting: dict[str, list[int]]) -> Iterator[str]:
    """The kinds that still have something, one after the other and round again."""
    while any(waiting.values()):
        yield from (kind for kind in waiting if waiting[kind])


def _drawn_crashes(crashes: Sequence[tuple[str, str]], most: int, seed: int) -> set[str]:
    """The labels of as many crash states, given the label and kind of each; those of the last kind, the most numerous
    one, are drawn last."""
    first = [index for index, (_, kind) in enumerate(crashes) if kind != CRASHES[-1]]
    last = [index for index, (_, kind) in enumerate(crashes) if kind == CRASHES[-1]]
    draw = random.Random(seed)
    chosen = draw.sample(first, min(len(first), most))
    chosen += draw.sample(last, min(len(last), most - len(chosen)))
    return {crashes[index][0] for index in chosen}


def planned_crash(state: State, trace: Trace) -> PlannedTrial:
    """A state as a trial, in words."""
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
    return PlannedTrial(state.label, state.kind, ", ".join([f"crash {where}", *parts]), state.tree)


def _of_damage(damage: Damage) -> PlannedTrial:
    return PlannedTrial(damage.label, damage.kind, damage.what, damage.tree)
