"""The nightly test of a head: which failures the last day's commits brought to a library or took away, with the text of
an issue for each new cause.

    shardproof night megatron-core --clone megatron-core=../Megatron-LM --now main --out reports/night

1. The commits of the last night and of this one are looked up in the clone. Where none between them changes the
   library's tree there is nothing to do.
2. Where they change a file that something of ours names (`touched`), `shardproof port` says what no longer fits.
3. `shardproof run nightly` walks a sample of the cured head, in a folder that keeps every night, so that a cause which
   was there yesterday is told from one that came today.
4. `shardproof bisect` names the commit of each failure that is new and first seen, within a budget of seconds for all.
   What is `unknown` is no failure of the library's, and is not bisected.
5. Each new cause has a file `issues/ID.md`, by the name of the cause, so that the next night writes the same file and a
   forge's client can find the issue that it opened. A cause that went has its file too, which says so.

Steps 2 to 4 are commands of their own, which are printed, so that each can be run again by hand. What the folder knows
of earlier nights stands in `night.json`.

*Does not verify*: that a commit which bisect names is at fault; it is the first on which the scenario fails so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.errors import UsageError
from shardproof.heads.named_files import changed_files, touched
from shardproof.issues.cures import available
from shardproof.issues.known_issues import KnownIssues
from shardproof.protocol.releases import Package
from shardproof.protocol.system import System
from shardproof.report.cause_wording import wording_of
from shardproof.report.causes import cause_of
from shardproof.report.history import FIRST, FIXED
from shardproof.report.model import Report
from shardproof.result import Result
from shardproof.store import DATABASE, Store
from shardproof.verdict import ExitStatus, Standing
from shardproof.versions import CURED
from shardproof.world.overlay import commit_of, git

STATE, ISSUES, SUMMARY, WALK, TONIGHT = "night.json", "issues", "summary.md", "walk", "tonight.txt"
_ID = 12
"""Characters of a commit in versions and texts."""


@dataclass(frozen=True)
class Ran:
    """How a command ended, and the last line of what it said on stderr."""

    status: int
    said: str = ""


Command = Callable[[Sequence[str]], Ran]
"""Runs a command of shardproof's, by its words."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A night as it was asked for.

    * last, now: revisions; an empty `last` is the commit of the night before, which `out` keeps.
    * sample: scenarios of the walk. budget_s: for all bisections together.
    * common: words of every command, such as `--clone X=DIR` and `--plugin M`. names: what is walked.
    """

    system: System
    package: Package
    last: str
    now: str
    out: Path
    sample: int
    budget_s: float
    jobs: int
    common: tuple[str, ...] = ()
    names: tuple[str, ...] = ("nightly",)

    @property
    def cured(self) -> str:
        """What stands behind a commit, so that known defects are taken away; nothing for a system without cures."""
        return CURED if available(self.system) else ""


@dataclass(frozen=True)
class Seen:
    """What is known of a cause over the nights.

    * title, effect: in words. signature: of the scenario. toml: the simplest scenario, as a file; without a version.
    * since, on: the commits on which it was first and last seen. gone: the commit on which it was found gone, if it is.
    * good, bad: what a bisection ended with, each a version; empty without one. note: why there is none, or what is
      open. subject: of the commit `bad`.
    """

    cause: str
    title: str
    effect: str
    signature: str
    toml: str
    since: str
    on: str
    gone: str = ""
    good: str = ""
    bad: str = ""
    subject: str = ""
    note: str = ""


@dataclass(frozen=True)
class Night:
    """What a night came to.

    * last, now: commits in full; `last` is empty on the first night. changed, touched: files of the library.
    * port: the status of the port; None where there was none. report: of the walk; None where nothing ran.
    * status_of_walk: the command's exit status. appeared, still, disappeared: causes that are first seen, still
      there, and gone.
    * cured: what stood behind the commit in the walk's version.
    """

    system: str
    last: str
    now: str
    changed: tuple[str, ...]
    touched: tuple[str, ...]
    port: int | None = None
    report: Report | None = None
    status_of_walk: int = 0
    appeared: tuple[Seen, ...] = ()
    still: tuple[Seen, ...] = ()
    disappeared: tuple[Seen, ...] = ()
    cured: str = ""

    @property
    def status(self) -> ExitStatus:
        """3 where the walk could not be judged; else 1 where a cause came tonight; else 3 where ours does not fit."""
        if self.status_of_walk in (ExitStatus.USAGE, ExitStatus.HARNESS):
            return ExitStatus.HARNESS
        if self.appeared:
            return ExitStatus.FAILURE
        return ExitStatus.HARNESS if self.port in (ExitStatus.USAGE, ExitStatus.HARNESS) else ExitStatus.OK


def night(asked: Asked, command: Command, issues: KnownIssues) -> Night:
    """Look at one night; writes everything into `asked.out`.

    Raises:
        UsageError: no clone, no such commit, or the folder's state is none of ours.
    """
    state = _state(asked.out / STATE)
    last = commit_of(asked.package, asked.last or state["now"]) if asked.last or state["now"] else ""
    now = commit_of(asked.package, asked.now)
    changed = tuple(changed_files(asked.package, last, now)) if last else ()
    ours = tuple(touched(asked.system, asked.package, last, now)) if last else ()
    found = Night(asked.system.name, last, now, changed, ours, cured=asked.cured)
    if not last or changed:
        found = _examine(asked, found, _said(command, asked.common), state["causes"], issues)
    seen = {one.cause: one for one in (*found.appeared, *found.still, *found.disappeared)}
    causes = {**state["causes"], **{name: asdict(one) for name, one in seen.items()}}
    asked.out.joinpath(STATE).write_text(json.dumps({"now": now, "causes": causes}, indent=1) + "\n", "utf-8")
    return found


def _state(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"now": "", "causes": {}}
    try:
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return {"now": str(found["now"]), "causes": {str(k): asdict(Seen(**v)) for k, v in found["causes"].items()}}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        allowed = f"a file that `shardproof night` wrote ({error})"
        raise UsageError.of("--out", str(file), allowed, "--out reports/another") from None


def _said(command: Command, common: Sequence[str]) -> Command:
    def run(words: Sequence[str]) -> Ran:
        return command([*words, *common])

    return run


def _examine(asked: Asked, found: Night, command: Command, known: dict[str, Any], issues: KnownIssues) -> Night:
    """The port, the walk and the bisections of a night that has something to look at."""
    head = f"git:{found.now[:_ID]}"
    name = f"{asked.system.name}@{head}"
    port = None
    if found.touched:
        words = ["port", name, "--quick", "--out", str(asked.out / "port"), "--json", str(asked.out / "port.json")]
        port = command([*words, "-j", str(asked.jobs)]).status
    folder = asked.out / WALK
    words = [
        "run",
        *asked.names,
        "--system",
        f"{name}{asked.cured}",
        "--sample",
        str(asked.sample),
        "--out",
        str(folder),
    ]
    status = command([*words, "-j", str(asked.jobs), "--quiet"]).status
    found = replace(found, port=port, status_of_walk=status)
    if status == ExitStatus.USAGE:
        return found
    with Store(folder / DATABASE) as store:
        report = Report.from_store(store, str(store.latest_run()), issues)
    turns = {trace.cause: turn for turn, traces in report.history.tonight.items() for trace in traces}
    new = [c for c in report.clusters() if c.simplest.counts_as is Standing.NEW]
    came: list[Seen] = []
    still: list[Seen] = []
    until = time.monotonic() + asked.budget_s
    for result in {cause_of(cluster.simplest): cluster.simplest for cluster in reversed(new)}.values():
        cause = cause_of(result)
        before = Seen(**known[cause]) if cause in known else None
        if before and not before.gone and turns.get(cause, FIRST) != FIRST:
            still.append(replace(before, on=found.now))
            continue
        fresh = _seen(cause, result, found.now)
        came.append(_bisected(fresh, asked, found, command, until - time.monotonic()))
    gone = [cause for cause, turn in turns.items() if turn == FIXED and cause in known]
    went = [replace(Seen(**known[cause]), gone=found.now) for cause in gone]
    return replace(found, report=report, appeared=tuple(came), still=tuple(still), disappeared=tuple(went))


def _seen(cause: str, result: Result, now: str) -> Seen:
    wording = wording_of(result)
    plain = replace(result.scenario, version="")
    return Seen(cause, wording.headline, wording.effect, result.signature, plain.to_toml(), now, now)


def _bisected(seen: Seen, asked: Asked, found: Night, command: Command, left_s: float) -> Seen:
    """A cause with the commit that it came with, as far as the budget goes."""
    folder = asked.out / "causes"
    folder.mkdir(exist_ok=True)
    file, answer = folder / f"{seen.cause}.toml", folder / f"{seen.cause}.json"
    file.write_text(f"# Written by shardproof night\n{seen.toml}", "utf-8")
    if not found.last:
        return replace(seen, note="this is the first night of the folder: how old it is was not looked for")
    if left_s <= 0:
        return replace(seen, note=f"not bisected: the budget of {asked.budget_s:.0f} s was spent on other causes")
    ends = [f"git:{commit[:_ID]}{asked.cured}" for commit in (found.last, found.now)]
    ran = command(
        ["bisect", str(file), "--good", ends[0], "--bad", ends[1], "--budget-s", f"{left_s:.0f}", "--json", str(answer)]
    )
    if ran.status != ExitStatus.OK:
        return replace(seen, note=f"the commits of the night do not say where it came: {ran.said}")
    document = json.loads(answer.read_text("utf-8"))
    good, bad = str(document["last_good"]), str(document["first_bad"])
    note = ""
    if document["skipped"]:
        why = "the budget was spent" if document["out_of_time"] else "they say nothing about this failure"
        note = f"it may be any of {len(document['skipped']) + 1} commits, up to the first bad one: {why}"
    return replace(seen, good=good, bad=bad, subject=_subject(asked.package, bad), note=note)


def _subject(package: Package, version: str) -> str:
    return git(package, "log", "-1", "--format=%cs %s", version.removeprefix("git:")).strip()


def commits_of_night(package: Package, found: Night) -> int:
    """How many commits lie between the two of a night."""
    return int(git(package, "rev-list", "--count", f"{found.last}..{found.now}")) if found.last else 0


def files_of(found: Night) -> Iterator[Seen]:
    """The causes of failure for which a night writes an issue text: newly appeared, still present, and disappeared
    ones."""
    yield from (*found.appeared, *found.still, *found.disappeared)
