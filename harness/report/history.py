"""What came and went in the runs of one folder: for each signature how many scenarios showed it on which night.

A scenario that was not planned on a night says nothing about that night. So a signature has only the nights on which
one of its scenarios ran, and what they say together is one of:

    new        it shows, and none of its scenarios failed with it before
    recurring  it shows, and did on every night since it was first seen
    flaky      it came, went and came again
    fixed      its scenarios ran on the last night, and none showed it
    not run    none of them ran on the last night

*Does not verify*: why something went away. Another release, or a change of ours, are both possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from harness.store import Store

NIGHTS = 30
"""So many runs are shown if nobody says otherwise, the latest ones."""

STATES = ("new", "flaky", "recurring", "fixed", "not run")
"""What a signature can be, in the order of the page."""


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
    """One signature through the nights. shown: on each night how many scenarios showed it; None where none of them
    ran. known: what it is known under; empty for new ones. example: the id of a scenario that showed it last."""

    signature: str
    known: str
    state: str
    shown: tuple[int | None, ...]
    example: str = ""

    @property
    def told(self) -> str:
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
        """On each night: how many signatures came, and how many went."""
        turned = [trace.turns for trace in self.traces]
        return tuple(
            (sum(turns.get(n) is True for turns in turned), sum(turns.get(n) is False for turns in turned))
            for n in range(len(self.nights))
        )

    def of(self, state: str) -> tuple[Trace, ...]:
        """The signatures in a state."""
        return tuple(trace for trace in self.traces if trace.state == state)

    @property
    def in_words(self) -> str:
        """How many signatures are in which state: `1 new, 3 recurring`."""
        counts = ((len(self.of(state)), state) for state in STATES)
        return ", ".join(f"{count} {state}" for count, state in counts if count) or "nothing ever failed"

    def to_json(self) -> dict[str, Any]:
        """The history in JSON types; in `shown`, null says that none of a signature's scenarios ran."""
        return {"nights": [asdict(night) for night in self.nights], "traces": [asdict(trace) for trace in self.traces]}


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
    rows = [row for row in store.shown(run_id) if row[0] in set(ids)]
    told = tuple(_night(run, started[run], rows) for run in ids)
    of_scenario: dict[str, list[Row]] = {}
    of_signature: dict[str, list[Row]] = {}
    for row in rows:
        of_scenario.setdefault(row[1], []).append(row)
        if row[2] != "pass":
            of_signature.setdefault(row[3], []).append(row)
    traces = [_trace(signature, ids, failing, of_scenario) for signature, failing in of_signature.items()]
    return History(told, tuple(sorted(traces, key=lambda t: (bool(t.known), STATES.index(t.state), t.signature))))


Row = tuple[str, str, str, str, str | None]


def _night(run: str, started: str, rows: Sequence[Row]) -> Night:
    here = [row for row in rows if row[0] == run]
    failing = [row for row in here if row[2] != "pass"]
    known = sum(1 for row in failing if row[4])
    return Night(run, started, len(failing) - known, known, len(here))


def _trace(signature: str, ids: Sequence[str], failing: Sequence[Row], of_scenario: Mapping[str, list[Row]]) -> Trace:
    """One signature, of the rows that show it and those of the same scenarios."""
    ran = {row[0] for scenario in {row[1] for row in failing} for row in of_scenario[scenario]}
    counts = Counter(row[0] for row in failing)
    shown = tuple(counts[run] if run in ran else None for run in ids)
    return Trace(signature, failing[-1][4] or "", state_of(shown), shown, failing[-1][1])


def state_of(shown: Sequence[int | None]) -> str:
    """What the nights of a signature say together: one of `STATES`."""
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
