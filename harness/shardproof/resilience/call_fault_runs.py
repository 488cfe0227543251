"""Runs a save or a load under strace with one system call made to fail, and classifies the outcome.

A save is struck in a folder that holds the old state, and what it leaves is then loaded without any fault. Two things
are asked: what the save said, and what the folder gives. The worst answer has a name of its own, `lied`: the save said
that it had saved, or at least raised nothing, and the folder does not give the new state. A failed sync counts as such
even if the folder gives the new state at once: after it the kernel may drop what it could not write, as fsync(2) says.

A load is struck in the folder that holds the new state, and what it gives is the answer. Where one rank alone was
struck, the folder is then loaded once more, without any fault, as after a restart: a load must leave it as it was.

*Verifies*: by strace's record that exactly one call was struck (of a load by several ranks: at least one); else the
trial is `missed`, and says nothing.
*Does not verify*: that the record of the save, from which the call was taken, is what every save does; a call that does
not come, or comes in another thread, is how a trial is missed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardproof.resilience.call_faults import LOAD_CALLS, RANKS, SYNCS, Strike
from shardproof.resilience.events import Tree
from shardproof.resilience.stack_processes import Lane
from shardproof.resilience.trace import CALLS, attached, calls_of, lines_of
from shardproof.resilience.trial import Known, TrialVerdict, classify

STOPPED_S = 20.0
"""Seconds that a save or load of which one rank is stopped may take. What the others can do without it takes them
less, also on a machine that is busy."""


def struck(
    lane: Lane, strike: Strike, before: Tree, after: Tree, known: Known, generation: int, run: int
) -> TrialVerdict:
    """What a strike led to.

    Args:
        before, after: the folder before and after the recorded save. generation, run: of that save.
    """
    folder = lane.folder(after if strike.of_load else before)
    record = lane.bench.root / f"strike-{lane.number}.strace"
    try:
        if strike.of_load:
            load = {"do": "load", "folder": str(folder)}
            answer = _answer(lane, load, strike, folder, record)
            if not _hit(strike, folder, record):
                return _missed()
            gives = classify(answer, known)
            if strike.kind not in RANKS or gives.outcome in ("silent", "old", "other"):
                return gives
            again = classify(lane.ask(load), known)
            return TrialVerdict(again.outcome, f"{_said(answer, 'load')}; loaded again: {_describe_verdict(again)}")
        asked = {"do": "save", "folder": str(folder), "generation": generation, "run": run}
        said = _answer(lane, asked, strike, folder, record)
        if not _hit(strike, folder, record):
            return _missed()
        return judged(strike, said, classify(lane.ask({"do": "load", "folder": str(folder)}), known))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)


def judged(strike: Strike, said: Mapping[str, Any], gives: TrialVerdict) -> TrialVerdict:
    """The verdict over a struck save.

    Args:
        said: how the save ended. gives: what the folder gave afterwards.
    """
    why = f"{_said(said, 'save')}; the folder gives: {_describe_verdict(gives)}"
    if said["ended"] == "ok" and gives.outcome != "new":
        return TrialVerdict("lied", why)
    if said["ended"] == "ok" and strike.call.name in SYNCS and strike.kind in ("EIO", "ENOSPC"):
        return TrialVerdict("lied", f"{why}, but what was not synced may be lost")
    if said["ended"] in ("hang", "crash") and strike.kind not in RANKS:
        return TrialVerdict(said["ended"], why)
    return TrialVerdict(gives.outcome, why)


def _describe_verdict(gives: TrialVerdict) -> str:
    return f"{gives.outcome}{f' ({gives.why})' if gives.why else ''}"


def _said(answer: Mapping[str, Any], what: str) -> str:
    match answer["ended"]:
        case "ok":
            return f"the {what} raised nothing"
        case "error":
            return f"the {what} raised {answer['why']}"
        case "hang":
            return f"the {what} did not end"
        case _:
            return f"the {what} was {answer['why']}"


def _missed() -> TrialVerdict:
    return TrialVerdict("missed", "the call did not come in time, or more than one was struck")


def _answer(lane: Lane, asked: dict[str, Any], strike: Strike, folder: Path, record: Path) -> dict[str, Any]:
    late = strike.kind.endswith("stopped-rank")
    stopped = {"deadline_s": min(STOPPED_S, lane.bench.deadline_s)} if late else {}
    if strike.of_load and strike.kind in RANKS and lane.bench.stack.ranks > 1:
        asked = {**asked, "rank": strike.call.rank}
    if not strike.injected:
        return lane.ask({**asked, "most_bytes": strike.most})
    options = ("-P", os.path.join(folder, strike.call.path).rstrip("/"), "-e", f"inject={strike.injected}")
    process = lane.begun({**asked, **stopped})
    with attached(process, record, *options, calls=LOAD_CALLS if strike.of_load else CALLS):
        return lane.ask({"do": "go"})


def _hit(strike: Strike, folder: Path, record: Path) -> bool:
    """Whether exactly one call was struck."""
    if not strike.injected:
        return True
    lines = lines_of(record)
    if strike.injected.partition(":")[2].startswith("signal="):
        calls = calls_of(lines, folder)
        return [(call.name, call.path, call.nth) for call in calls].count(
            (strike.call.name, strike.call.path, strike.call.nth)
        ) == 1  # fmt: skip
    hits = sum(line.endswith(("(INJECTED)", "(DELAYED)")) for line in lines)
    return hits >= 1 if strike.of_load else hits == 1
