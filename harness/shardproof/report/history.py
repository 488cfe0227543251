"""The history of a folder's runs: for each cause of failures, the number of scenarios that showed it on each night.

A cause is a mechanism or, without one, a signature (`shardproof.report.causes`). A scenario that was not planned on a
night says nothing about that night. So a cause has only the nights on which one of its scenarios ran, and what they say
together is one of:

    new        it shows, and none of its scenarios failed with it before
    recurring  it shows, and did on every night since it was first seen
    flaky      it came, went and came again
    fixed      its scenarios ran on the last night, and none showed it
    not run    none of them ran on the last night

What the last night alone says, against those before it, is one of `TURNS`. A scenario of a commit (`git:REV`) is the
same scenario on the next night's commit, so that a night on a head is compared with the one before.

*Does not verify*: why something went away. Another release, or a change of ours, are both possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from shardproof.report.causes import name_of
from shardproof.store import Store
from shardproof.store_history import Shown

NIGHTS = 30
"""So many runs are shown if nobody says otherwise, the latest ones."""

STATES = ("new", "flaky", "recurring", "fixed", "not run")
"""What a cause can be, in the order of the page."""

FIRST, BACK, STILL, FIXED = "first seen", "back again", "still there", "fixed"
CALLED = (STATES[0], FIRST, *STATES[1:])
"""What a reader is told of a state, in the order of the page. A known issue that shows for the first time is seen for
the first time; new is what nobody knows."""

TURNS = (FIRST, BACK, STILL, FIXED)
"""What the last night says of a cause: it shows and did on no earlier night; it shows again, after the last night on
which it could have was without it; it shows as on that night; it showed then, and does not now."""


@dataclass(frozen=True)
class Night:
    """One run. started: UTC. new, known: failures. scenarios: of those that ever failed, how many ran."""

    run: str
    started: str
    new: int
    known: int
    scenarios: int


@dataclass(frozen=True)
class Trace:
    """One cause through the nights. signature: of the scenario that showed it last, and example its id. shown: on each
    night how many scenarios showed it; None where none of them ran. known: what it is known under; empty for new ones.
    cause: its name in every report."""

    signature: str
    known: str
    state: str
    shown: tuple[int | None, ...]
    example: str = ""
    cause: str = ""

    @property
    def called(self) -> str:
        """The state as a reader is told: one of `CALLED`."""
        return FIRST if self.known and self.state == STATES[0] else self.state

    @property
    def turn(self) -> str:
        """How the cause changed in the last night: one of `TURNS`, such as `FIRST` or `FIXED`. Empty if no scenario of
        the cause ran, or if the cause had not been seen before and was not seen now."""
        *earlier, now = self.shown
        before = [count for count in earlier if count is not None]
        if now is None:
            return ""
        if now:
            return FIRST if not any(before) else STILL if before[-1] else BACK
        return FIXED if before and before[-1] else ""

    @property
    def nights_text(self) -> str:
        """The nights in words."""
        return ", ".join("not run" if count is None else str(count) for count in self.shown)

    @property
    def first(self) -> int:
        """The night on which it showed first, from 0."""
        return next(night for night, count in enumerate(self.shown) if count)

    @property
    def last(self) -> int:
        """The night on which it showed last, from 0."""
        return max(night for night, count in enumerate(self.shown) if count)

    @property
    def turns(self) -> dict[int, bool]:
        """The nights on which it came (True) or went; what was there on the first night of all did not come."""
        there = [(night, count > 0) for night, count in enumerate(self.shown) if count is not None]
        came = {there[0][0]: True} if there[0][0] > 0 and there[0][1] else {}
        return came | {night: now for (_, before), (night, now) in pairwise(there) if before != now}


@dataclass(frozen=True)
class History:
    """The nights of a folder, oldest first, and what showed on them."""

    nights: tuple[Night, ...] = ()
    traces: tuple[Trace, ...] = ()

    @property
    def most(self) -> int:
        """The most failures of one night, at least 1."""
        return max((night.new + night.known for night in self.nights), default=0) or 1

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """On each night: how many causes came, and how many went."""
        turned = [trace.turns for trace in self.traces]
        return tuple(
            (sum(turns.get(n) is True for turns in turned), sum(turns.get(n) is False for turns in turned))
            for n in range(len(self.nights))
        )

    @property
    def sections(self) -> tuple[tuple[str, tuple[Trace, ...]], ...]:
        """The causes by what a reader is told of their state, which are the page's sections."""
        found = ((called, tuple(trace for trace in self.traces if trace.called == called)) for called in CALLED)
        return tuple((called, traces) for called, traces in found if traces)

    @property
    def tonight(self) -> dict[str, tuple[Trace, ...]]:
        """What the last night says of each cause: one of `TURNS` → the causes."""
        return {turn: tuple(trace for trace in self.traces if trace.turn == turn) for turn in TURNS}

    @property
    def tonight_in_words(self) -> str:
        """How many causes turned how on the last night: `1 first seen, 2 still there, 1 fixed`."""
        counts = ((len(traces), turn) for turn, traces in self.tonight.items())
        return ", ".join(f"{count} {turn}" for count, turn in counts if count)

    @property
    def in_words(self) -> str:
        """How many causes are in which state, those of known issues apart: `1 new, 3 recurring; of known issues: 1
        first seen`. What shows for the first time and is known is not called new, which means unknown elsewhere."""
        own = _counted([trace for trace in self.traces if not trace.known])
        known = _counted([trace for trace in self.traces if trace.known])
        found = [own] if own else ["none new"] if known else []
        return "; ".join([*found, *([f"of known issues: {known}"] if known else [])]) or "nothing ever failed"

    def to_json(self) -> dict[str, Any]:
        """The history in JSON types; in `shown`, null says that none of a cause's scenarios ran."""
        return {
            "nights": [asdict(night) for night in self.nights],
            "tonight": {turn: [trace.cause for trace in traces] for turn, traces in self.tonight.items()},
            "traces": [asdict(trace) for trace in self.traces],
        }


def history_of(store: Store, run_id: str, nights: int = NIGHTS, least: int = 2) -> History:
    """The history of a folder up to a run.

    Args:
        nights: so many runs at most, the latest ones.
        least: it is empty where there are fewer runs. On a single night everything that fails is new.
    """
    started = {run.id: run.started_at[:16].replace("T", " ") for run in store.runs()}
    ids = list(started)[: list(started).index(run_id) + 1][-nights:]
    if len(ids) < least:
        return History()
    rows = [row for row in store.shown(run_id) if row.run in set(ids)]
    told = tuple(_night(run, started[run], rows) for run in ids)
    of_scenario: dict[str, list[Shown]] = {}
    of_cause: dict[str, list[Shown]] = {}
    for row in rows:
        of_scenario.setdefault(row.scenario, []).append(row)
        if row.verdict != "pass":
            of_cause.setdefault(_cause(row), []).append(row)
    traces = [_trace(cause, ids, failing, of_scenario) for cause, failing in of_cause.items()]
    return History(told, tuple(sorted(traces, key=lambda t: (bool(t.known), STATES.index(t.state), t.signature))))


def _counted(traces: Sequence[Trace]) -> str:
    """How many causes are in which state, as a reader is told."""
    counts = Counter(trace.called for trace in traces)
    return ", ".join(f"{counts[called]} {called}" for called in CALLED if counts[called])


def _cause(row: Shown) -> str:
    return name_of(row.system, row.verdict, row.op, row.mechanism, row.signature)


def _night(run: str, started: str, rows: Sequence[Shown]) -> Night:
    here = [row for row in rows if row.run == run]
    failing = [row for row in here if row.verdict != "pass"]
    known = sum(1 for row in failing if row.known)
    return Night(run, started, len(failing) - known, known, len(here))


def _trace(cause: str, ids: Sequence[str], failing: Sequence[Shown], of_scenario: Mapping[str, list[Shown]]) -> Trace:
    """The history of one cause: per night, the number of scenarios that failed with the cause, or None if none of its
    scenarios ran."""
    ran = {row.run for scenario in {row.scenario for row in failing} for row in of_scenario[scenario]}
    counts = Counter(row.run for row in failing)
    shown = tuple(counts[run] if run in ran else None for run in ids)
    last = failing[-1]
    return Trace(last.signature, last.known or "", state_of(shown), shown, last.id, cause)


def state_of(shown: Sequence[int | None]) -> str:
    """What the nights of a cause say together: one of `STATES`."""
    if not shown or shown[-1] is None:
        return "not run"
    there = [count > 0 for count in shown if count is not None]
    since = there[there.index(True) :]
    changes = sum(1 for before, after in pairwise(since) if before != after)
    if changes > 1:
        return "flaky"
    if changes:
        return "fixed"
    return "new" if len(since) == 1 else "recurring"
